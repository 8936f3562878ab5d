"""Router and verifier read the same facts of a checkpoint and apply the same bounds to a request."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from dendro.calls import OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest
from dendro.internal.v1 import verifier_pb2
from dendro.options import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE
from dendro.text import Limits, Sampling, Tokens
from dendro.v1 import generation_pb2 as pb
from dendro.wire import verifier_call_from, verifier_call_message
from tree_kernels import warp
from tree_layers.checkpoint import read_facts

from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.peers.pools import LocalPeers
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.running import local_ingress
from cluster.sessions import MemorySessions
from tests.support import edge, tiny_models
from tests.support.edge import EdgePeers, ingress
from verifier_service.requests import processors_of

PROMPT = [5, 6, 7]
NUMBERS = [0.0, 5e-324, 1e-300, 1e-9, 1e-7, 1e-6, 0.5, 1.0, 1.5, 1e38, 1e300, float("inf"), float("nan"), -1.0]


def config_of(folder: Path) -> Config:
    return Config.of({"targets": {"t": {"checkpoint": folder, "dtype": "float32", "max_length": 128}}}, folder)


async def hello_and_router(folder: Path):
    """The hello of a verifier of a checkpoint, and a router of the same checkpoint."""
    config = config_of(folder)
    places = LocalPeers.load(config, None)
    try:
        router = Ingress(config, places, MemorySessions())
        return await places.engines[0].hello(), router._served["t"]
    finally:
        await places.close()


@pytest.mark.parametrize(
    "config, generation",
    [({"eos_token_id": None}, None), ({"eos_token_id": 2}, {"eos_token_id": [7, 9]}), ({}, {"eos_token_id": None})],
    ids=["none", "generation", "config"],
)
async def test_router_and_verifier_read_the_same_end_ids_vocabulary_and_tokenizer(tmp_path: Path, config, generation):
    """Without an end id in any file, the library's class has a default, 2 for a Llama. Neither side uses it."""
    tiny_models.make_checkpoint(tmp_path)
    merged = json.loads((tmp_path / "config.json").read_text()) | config
    merged = {key: value for key, value in merged.items() if value is not None or key != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(merged))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    hello, served = await hello_and_router(tmp_path)
    assert set(hello.end_ids) == served.end_ids
    assert (hello.vocabulary, hello.tokenizer) == (served.vocabulary, served.tokenizer.fingerprint)
    assert served.vocabulary == tiny_models.VOCABULARY < tiny_models.PADDED


async def test_an_answer_that_ended_is_not_resumed_past_its_end(tmp_path: Path):
    """The end id is named by the tokenizer and not by the checkpoint's configuration."""
    tiny_models.make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    async with local_ingress(config_of(tmp_path)) as router:
        free = await LocalClient(router).generate_text("abc", max_new_tokens=24)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    end = free.token_ids[5]
    text = next(text for text, token in tokenizer["model"]["vocab"].items() if token == end)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text})
    )
    async with local_ingress(config_of(tmp_path)) as router:
        request = pb.GenerateRequest(text="abc", max_new_tokens=24)
        answer = [response async for response in router.generate(request)]
        started, ended = answer[0].started, [token for each in answer for token in each.chunk.token_ids]
        assert tuple(ended) == tuple(free.token_ids[: free.token_ids.index(end) + 1])
        assert answer[-1].complete.finish_reason == pb.FINISH_REASON_END_OF_TEXT
        request.resume.token_ids.extend(ended)
        for name in ("seed", "prompt_tokens", "prompt_digest", "target"):
            setattr(request.resume, name, getattr(started, name))
        responses = [response async for response in router.generate(request)]
    assert not any(response.HasField("chunk") for response in responses)
    assert responses[-1].complete.finish_reason == pb.FINISH_REASON_END_OF_TEXT


async def test_ids_in_the_padding_are_refused_at_admission(tmp_path: Path):
    tiny_models.make_checkpoint(tmp_path)
    async with local_ingress(config_of(tmp_path)) as router:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, tiny_models.VOCABULARY]), max_new_tokens=2)
        with pytest.raises(BadRequest, match=r"prompt.token_ids\[1\]: 257 is outside the vocabulary of 257"):
            _ = [response async for response in router.generate(request)]


async def test_a_text_with_tokens_past_the_models_rows_is_refused_at_admission(tmp_path: Path):
    """With a tokenizer larger than the model, router, verifier and drafter ignore ids past the model's rows."""
    tiny_models.make_checkpoint(tmp_path, vocab_size=200, bos_token_id=1, eos_token_id=1, pad_token_id=1)
    hello, served = await hello_and_router(tmp_path)
    assert hello.vocabulary == served.vocabulary == 200
    async with local_ingress(config_of(tmp_path)) as router:
        high = next(chr(code) for code in range(33, 1000) if max(served.tokenizer.encode(chr(code), True)) >= 200)
        with pytest.raises(BadRequest, match=r"^prompt.text: has the token 2\d\d; the model has 200"):
            _ = [response async for response in router.generate(pb.GenerateRequest(text=high, max_new_tokens=2))]


async def test_a_session_continues_if_the_tokenizers_file_changes_but_not_if_its_ids_change_meaning(tmp_path: Path):
    """A record contains ids, so only their meaning must stay; the tokenization of new text may change."""
    tiny_models.make_checkpoint(tmp_path)
    file, sessions = tmp_path / "tokenizer.json", MemorySessions()

    def router() -> LocalClient:
        tokenizer = CheckpointTokenizer(tmp_path, read_facts(tmp_path).tokenizer)
        served = Served("demo", tokenizer, 60, 256, frozenset(), "float32")
        return LocalClient(Ingress(edge.config(), EdgePeers(), sessions, {"demo": served}))

    first = await router().generate_text(PROMPT, max_new_tokens=4, keep_session=True, speculation="off")
    tokenizer = json.loads(file.read_text())
    file.write_text(json.dumps(tokenizer | {"normalizer": {"type": "NFC"}}, indent=4))
    session = first.complete.session
    done = await router().generate_text(PROMPT, max_new_tokens=4, session=session, speculation="off")
    assert done.complete.prompt_tokens == 2 * len(PROMPT) + 4
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(BadRequest, match="session: was written with another tokenizer"):
        await router().generate_text(PROMPT, max_new_tokens=4, session=session, speculation="off")


def admitted(field: str, value: float) -> str:
    """The field by which admission refuses this sampling value; empty if it is accepted."""
    try:
        Sampling(**{"temperature": 0.7, field: value})
    except BadRequest as error:
        return error.field
    return ""


@pytest.mark.parametrize("value", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_admission_and_peers_accept_the_same_sampling_values(field: str, value: float):
    update = TextUpdate.of(new_opening(), Tokens(PROMPT), 0)
    message = verifier_call_message(
        1, OpenCall(update, RequestParameters(Sampling(temperature=0.7), Limits(9), "", ()))
    )
    setattr(message.open.sampling, field, value)
    refused = ""
    try:
        parameters = verifier_call_from(verifier_pb2.VerifierCall.FromString(message.SerializeToString())).parameters
    except BadRequest as error:
        refused = error.field
    else:  # the kernels accept it too
        sampling = parameters.sampling
        warp.Warp.of(sampling)
        processors_of(parameters, frozenset())
    assert refused == admitted(field, value)
    assert refused in ("", field)


@pytest.mark.parametrize("value", NUMBERS, ids=str)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_kernels_accept_the_sampling_values_that_admission_accepts(field: str, value: float):
    refused = ""
    try:
        warp.Warp(**{"temperature": 0.7, field: value})
    except ValueError as error:
        refused = str(error).partition(":")[0]
    assert refused == admitted(field, value)


@pytest.mark.parametrize("temperature", [1e-7, 1.1e30, 1e39, math.inf])
async def test_a_temperature_by_which_logits_cannot_be_divided_is_refused_at_admission(temperature):
    places = EdgePeers()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(temperature=temperature))
    with pytest.raises(BadRequest, match="temperature: must be 0"):
        _ = [response async for response in ingress(places).generate(request)]
    assert not places.texts


def test_the_bounds_of_temperatures_are_the_kernels():
    assert (SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE) == (warp.SMALLEST_TEMPERATURE, warp.LARGEST_TEMPERATURE)
