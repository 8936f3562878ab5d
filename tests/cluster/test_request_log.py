"""The log's line of each answer: one JSON object with the id that the client sees, and nothing that was written."""

from __future__ import annotations

import json
import logging
from logging.handlers import MemoryHandler

import pytest
from dendro.errors import BadRequest, PeerLost
from dendro.v1 import generation_pb2 as pb
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from cluster import app
from cluster.api.local import LocalClient
from tests.support.edge import EdgePeers, ingress

PROMPT, TENANT = "a secret prompt", "acme-of-town"


@pytest.fixture
def lines(caplog):
    """The lines so far, read as JSON; each record must be one line."""
    caplog.set_level(logging.INFO, "dendro")

    def found():
        messages = [record.getMessage() for record in caplog.records if record.name == "dendro.requests"]
        assert not any("\n" in message for message in messages)
        return [json.loads(message) for message in messages]

    return found


async def test_a_line_has_the_clients_id_and_the_statistics_that_the_client_gets(lines, caplog):
    done = await LocalClient(ingress(EdgePeers()), TENANT).generate_text(
        PROMPT, max_new_tokens=30, speculation="(1,1,1)", request_id="mine"
    )
    (line,) = lines()
    stats = done.complete.speculation
    assert line["request_id"] == done.started.request_id == "mine" and line["outcome"] == "length"
    assert (line["prompt_tokens"], line["tokens"], line["target"]) == (len(PROMPT), 30, "demo")
    assert (line["rounds"], line["guesses"], line["accepted"]) == (
        stats.rounds,
        stats.drafted_tokens,
        stats.accepted_tokens,
    )
    assert 0 <= line["first_token_s"] <= line["seconds"] and not line["resumed"]
    whole = "\n".join(record.getMessage() for record in caplog.records)
    assert PROMPT not in whole and TENANT not in whole and done.text not in whole


async def test_an_id_that_the_router_made_is_the_one_in_the_line(lines):
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, max_new_tokens=3)
    assert done.started.request_id and [line["request_id"] for line in lines()] == [done.started.request_id]


async def test_an_id_cannot_begin_another_line(lines):
    request = pb.GenerateRequest(text=PROMPT, max_new_tokens=2, request_id='a"\n{"request_id": "b"')
    with pytest.raises(BadRequest, match="request_id"):
        await anext(ingress(EdgePeers()).generate(request))
    assert [line["request_id"] for line in lines()] == ['a"\\n{"request_id": "b"']


@pytest.mark.parametrize("fault, outcome", [("field", "BadRequest"), ("dead", "PeerLost")])
async def test_an_answer_that_fails_has_a_line_with_its_error(lines, fault, outcome):
    peers = EdgePeers()
    peers.dead = fault == "dead"
    with pytest.raises((BadRequest, PeerLost)):
        await LocalClient(ingress(peers)).generate_text(PROMPT, temperature=-1.0 if fault == "field" else 0.0)
    (line,) = lines()
    assert line["outcome"] == outcome and line["tokens"] == 0 and line["first_token_s"] is None


async def test_a_client_that_leaves_has_a_line(lines):
    answer = ingress(EdgePeers()).generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=400))
    await anext(answer)
    await answer.aclose()
    (line,) = lines()
    assert line["outcome"] == "left"


def test_a_replica_logs_a_line_once_to_its_file_and_not_to_stderr(tmp_path, capfd, monkeypatch: pytest.MonkeyPatch):
    ours, serve = logging.getLogger("dendro"), logging.getLogger("ray.serve")
    for logger in (ours, serve):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "filters", [])  # a cluster that ran in this process leaves one
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "level", logger.level)
    config = LoggingConfig(logs_dir=str(tmp_path))
    configure_component_logger(
        component_name="router", component_id="7", logging_config=config, max_bytes=1 << 20, backup_count=1
    )
    app.log_to_serve_file()
    logging.getLogger("dendro.requests").info("an answer")
    serve.info("a lease")
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    for handler in serve.handlers:
        assert isinstance(handler, MemoryHandler) and handler.target is not None
        handler.target.close()
        handler.close()
    assert written.count("an answer") == written.count("a lease") == 1
    assert not capfd.readouterr().err
