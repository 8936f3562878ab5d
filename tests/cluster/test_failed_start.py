"""A replica's reason for not starting reaches the command in one line."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import sys
import traceback
from pathlib import Path

import pytest
from dendro.errors import BadRequest, DendroError, EngineFailed
from tree_layers.errors import CheckpointError

from cluster import deploy
from cluster.failed_start import last_line, refusal_in
from cluster.redis_server import RedisServer
from tests.support.toy_cluster import LOADERS, toy_config
from verifier_service.models.families import FamilyError, Property

ROOT = Path(__file__).parents[2]
PACKAGES = {"protos": "protos", "kernels": "kernels", "cluster": ".", "verifier_service": ".", "drafter_service": "."}
EXCEPTIONS = ("Exception", "Error", "DendroError", "EngineFailed", "Overloaded", "CheckpointError", "ValueError")
REASON = "has weights that the configuration does not describe"


def our_errors() -> list[tuple[str, str]]:
    """Module and name of every class of the packages that derives from a class named as an exception."""
    found = []
    for folder, parent in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT / parent).with_suffix("").parts)
            found += [
                (module, node.name)
                for node in ast.parse(file.read_text()).body
                if isinstance(node, ast.ClassDef)
                and any(isinstance(b, ast.Name) and b.id.endswith(EXCEPTIONS) for b in node.bases)
            ]
    return found


@pytest.mark.parametrize("module, name", our_errors())
def test_an_error_is_the_same_after_it_crossed_a_process(module: str, name: str):
    kind = getattr(importlib.import_module(module), name)
    given = {"folder": Path("f"), "why": Property.STATES, "message": "m", "session_id": "s"}
    signature = inspect.signature(kind.__init__) if "__init__" in vars(kind) else None
    names = [each for each in signature.parameters if each != "self"] if signature else ["message"]
    error = kind(*(given.get(each, each) for each in names))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    "raised, kind, text",
    [
        (BadRequest("targets.demo.checkpoint", REASON), BadRequest, f"targets.demo.checkpoint: {REASON}"),
        (CheckpointError(f"folder: {REASON}"), EngineFailed, f"model: folder: {REASON}"),
        (
            FamilyError(Path("f"), "bart", Property.ENCODER_DECODER),
            EngineFailed,
            "model: f: bart is an encoder-decoder",
        ),
    ],
)
def test_a_refusal_is_read_from_a_replicas_traceback(raised: Exception, kind: type[DendroError], text: str):
    try:
        try:
            raise ValueError("before")
        except ValueError as error:
            raise raised from error
    except Exception:
        message = f"A replica failed to start with exception. Retrying 2 more time(s). Error:\n{traceback.format_exc()}"
    found = refusal_in(message)
    assert type(found) is kind and str(found).startswith(text)
    assert last_line(message).endswith(str(raised))


def test_another_failure_is_no_refusal():
    message = "Error:\n  File 'x', line 3, in errors.BadRequest\nRuntimeError: out of memory\n"
    assert refusal_in(message) is None and last_line(message) == "RuntimeError: out of memory"
    assert refusal_in("") is None and last_line("") == ""


def refusing_verifier(name, model, states):
    raise BadRequest(f"targets.{name}.checkpoint", REASON)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(300)  # starting Ray alone may take more than 100 s beside another test's Ray
def test_a_model_that_a_replica_refuses_ends_the_start_with_its_reason(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with RedisServer() as server, pytest.raises(BadRequest) as refused:
        deploy.start(toy_config(), server.url, **LOADERS | {"verifier": refusing_verifier})
    assert str(refused.value) == f"targets.toy.checkpoint: {REASON}"
