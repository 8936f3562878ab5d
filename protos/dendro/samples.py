"""Requests for several answers to one prompt."""

from __future__ import annotations

from dendro.errors import BadRequest
from dendro.options import OPTIONS
from dendro.v1 import generation_pb2 as pb


def count_of_answers(request: pb.GenerateRequest) -> int:
    """Number of answers that a request asks for. Raises BadRequest for a number of answers that no server gives, and
    for several where there can be only one."""
    if request.HasField("n"):
        OPTIONS["n"].check(request.n)
    if request.n <= 1:
        return 1
    for name in ("session", "keep_session"):
        if getattr(request, name):
            raise BadRequest("n", f"is {request.n}, but a session continues with one answer; ask without {name}")
    if request.HasField("resume"):
        raise BadRequest(
            "n", f"is {request.n} in a resume; resume each answer by a request of its own, with its sample_index"
        )
    first = request.sampling.sample_index
    if first + request.n > 1 << 32:
        raise BadRequest("sample_index", f"is {first}; {request.n} answers from there on exceed 32 bits")
    return request.n


def request_of_sample(request: pb.GenerateRequest, sample: int) -> pb.GenerateRequest:
    """A request of its own for one of several answers. It is a copy of the whole message."""
    one = pb.GenerateRequest()
    one.CopyFrom(request)
    one.ClearField("n")
    one.echo = request.echo and not sample
    one.sampling.sample_index = request.sampling.sample_index + sample
    return one


def one_answer(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request. Raises BadRequest if it asks for several answers."""
    if request.n > 1:
        raise BadRequest("n", f"is {request.n}, but this call returns one answer; use generate_samples or generate")
    return request
