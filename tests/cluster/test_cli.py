"""The command: in this process against fakes, and `serve` in a process of its own, with real parts."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import psutil
import pytest
from cases import few_of
from dendro.answer import SpeculationStats
from dendro.text import Sampling
from edge import EdgePeers, ingress, plain_answer
from typer.testing import CliRunner, Result

from cluster import cli
from cluster.api.grpc import serve_plain
from cluster.api.local import LocalClient
from cluster.config import DEMO_MODELS

PROMPT = "walk the "
IDS = list(PROMPT.encode())


async def run(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli.app, list(words), env={"COLUMNS": "200"})


@pytest.fixture
async def address():
    server, address = await serve_plain(ingress(EdgePeers()))
    yield address
    await server.stop(0)


@pytest.mark.parametrize(
    "command", ["serve", "config", "check", "generate", "demo", "certify", "tune", "train", "bench"]
)
def test_help_names_every_command(command: str):
    assert command in CliRunner().invoke(cli.app, ["--help"]).stdout


def test_help_of_generate_names_every_option():
    said = CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("address", "local", "session", "temperature", "top-k", "top-p", "seed", "speculation", "json"):
        assert f"--{option} " in said
    for option in ("policy", "max-nodes", "draft-deadline-ms"):
        assert f"--{option} " in said


def test_help_of_training_names_every_option():
    said = CliRunner().invoke(cli.app, ["train", "demo", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("out", "minutes", "seed", "resume", "threads", "stop-after", "only"):
        assert f"--{option} " in said


def test_the_command_does_not_import_torch_and_sets_what_arithmetic_depends_on():
    show = "print('torch' in sys.modules, os.environ['MKL_CBWR'], os.environ['OMP_WAIT_POLICY'])"
    code = f"import cluster.cli, os, sys; {show}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "AUTO,STRICT", "passive"]


async def test_generate_streams_the_text_alone_to_stdout(address: str):
    done = await run("generate", PROMPT, "--address", address, "--max-new-tokens", "20")
    assert done.exit_code == 0
    assert done.stdout == bytes(plain_answer(IDS, Sampling(), 20)).decode(errors="replace") + "\n"
    assert "tokens/s" in done.stderr


async def test_generate_shows_the_account_of_the_answer(address: str):
    words = ("--speculation", "1,1,1", "--max-new-tokens", "10", "--max-nodes", "3", "--draft-deadline-ms", "400")
    done = await run("generate", PROMPT, "--address", address, *words)
    for said in (
        "10 tokens in 3 rounds, 3.33 a round",
        "guesses: 9 drafted, 8 accepted, 1 discarded",
        "shapes, by fixed: (1,1,1) x 3",
        "tokens of a round: 2 in 1, 4 in 2 rounds",
    ):
        assert said in done.stderr


async def test_the_options_of_generate_reach_the_request(address: str):
    words = ("--policy", "paper_ucb", "--max-nodes", "3", "--draft-deadline-ms", "400", "--max-new-tokens", "9")
    said = json.loads((await run("generate", PROMPT, "--address", address, "--json", *words)).stdout)
    assert said["speculation"]["policy"] == "paper_ucb" and set(said["speculation"]["pulls"]) == {"off", "(1,1,1)"}


async def test_generate_json_is_one_object_with_all_there_is_to_say(address: str):
    words = ("--temperature", "0.8", "--seed", "7", "--speculation", "2,1", "--max-new-tokens", "12", "--keep-session")
    done = await run("generate", PROMPT, "--address", address, "--json", *words)
    said = json.loads(done.stdout)
    assert said["token_ids"] == plain_answer(IDS, Sampling(temperature=0.8, seed=7), 12)
    assert (said["seed"], said["finish"], said["completion_tokens"]) == (7, "length", 12)
    assert set(said["speculation"]["pulls"]) == {"(2,1)"} and said["session"]
    account = SpeculationStats(**{name: value for name, value in said["speculation"].items() if name != "tokens_per_s"})
    assert account.rounds == len(said["rounds"]) and account.policy == "fixed"
    assert account.drafted_tokens == account.accepted_tokens + account.discarded_tokens == 4 * account.rounds
    two = await run("generate", " on", "--address", address, "--json", "--session", said["session"])
    assert json.loads(two.stdout)["prompt_tokens"] == len(IDS) + 12 + 3


@pytest.mark.parametrize(
    "words, said",
    [
        (["generate", "x", "--address", "ADDRESS", "--temperature", "-1"], "temperature: "),
        (["generate", "x", "--address", "ADDRESS", "--speculation", "wide"], "speculation.shape: "),
        (["generate", "x", "--address", "ADDRESS", "--policy", "best"], "speculation.policy: "),
        (["generate", "x", "--address", "ADDRESS", "--draft-deadline-ms", "0"], "speculation.deadline_ms: "),
        (["generate", "x", "--address", "ADDRESS", "--local"], "--local: "),
        (["generate", "x", "--config", "nowhere.yaml"], "config: there is no file nowhere.yaml"),
    ],
)
async def test_bad_input_is_one_line_and_status_2(
    address: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["dendro", *(word.replace("ADDRESS", address) for word in words)])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


def test_serve_refuses_a_configuration_before_it_starts_anything():
    words = [sys.executable, "-m", "cluster.cli", "serve", "nowhere.yaml"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: config: there is no file nowhere.yaml"]


async def test_demo_shows_two_turns_what_the_policy_picked_and_what_was_restored(monkeypatch: pytest.MonkeyPatch):
    places = EdgePeers()

    @asynccontextmanager
    async def client(*_: object):
        yield LocalClient(ingress(places))

    monkeypatch.setattr(cli, "_client", client)
    monkeypatch.setattr(cli, "descendants", frozenset)
    done = await run("demo", "--prompt", PROMPT, "--max-new-tokens", "12")
    assert done.exit_code == 0, done.output
    for line in (
        "Turn one.",
        "Turn two",
        "emitted per round",
        "shapes the policy picked",
        "processed again",
        "x; medians",
    ):
        assert line in done.stdout
    assert places.texts[1].marks == (len(IDS) + 12,)


@pytest.fixture
def orphan():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child.pid
    child.kill()
    child.wait()


async def test_demo_fails_where_a_process_is_left_behind(orphan: int, monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def client(*_: object):
        yield LocalClient(ingress(EdgePeers()))

    monkeypatch.setattr(cli, "_client", client)
    monkeypatch.setattr(cli, "SHUTDOWN_S", 0.05)
    done = await run("demo", "--prompt", PROMPT, "--max-new-tokens", "4")
    assert done.exit_code == 1 and f"({orphan})" in done.stderr


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("number", few_of([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_ends_serve_in_order(number, tmp_path):
    """With status 0, and nothing that it started left behind; Ray would end the process itself on a SIGTERM."""
    config = tmp_path / "cluster.yaml"
    target, drafter = DEMO_MODELS / "target", DEMO_MODELS / "mamba"
    config.write_text(
        f"targets: {{demo: {{checkpoint: {target}, resources: {{cpu: 0.5}}}}}}\n"
        f"drafters: {{mamba: {{checkpoint: {drafter}, resources: {{cpu: 0.5}}}}}}\n"
        "grpc: {port: 0}\n"
    )
    command = [sys.executable, "-m", "cluster.cli", "serve", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("127.0.0.1:")
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) == 0
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
