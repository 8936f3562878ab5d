"""The command `dendro`: in this process with fakes; `serve` in a separate process with real parts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager
from itertools import count

import psutil
import pytest
from dendro.answer import SpeculationStats
from dendro.attempts import Attempts
from dendro.options import OPTIONS, OptionGroup
from dendro.text import Sampling
from typer.testing import CliRunner, Result

from cluster import cli, slow_commands
from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.config import DEMO_MODELS
from cluster.demo import real_pair
from cluster.request_options import PARTS
from tests.support.cases import few_of
from tests.support.edge import END, EdgePeers, ingress, plain_answer

PROMPT = "walk the "
IDS = list(PROMPT.encode())


async def run(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli.app, list(words), env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "config",
        "check",
        "generate",
        "chat",
        "explain",
        "top",
        "demo",
        "certify",
        "tune",
        "predict",
        "train",
        "bench",
    ],
)
def test_help_names_every_command(command: str):
    assert command in CliRunner().invoke(cli.app, ["--help"]).stdout


def test_help_of_generate_names_every_option():
    output = CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("address", "local", "session", "temperature", "top-k", "top-p", "seed", "speculation", "json"):
        assert f"--{option} " in output
    for option in ("policy", "max-nodes", "draft-deadline-ms"):
        assert f"--{option} " in output
    for option in GENERATE_OPTIONS:
        assert f"--{option} " in output


GENERATE_OPTIONS = (
    *("model", "keep-session", "min-p", "repetition-penalty", "presence-penalty", "frequency-penalty", "logit-bias"),
    *(
        "logit-bias-text",
        "ban",
        "allow",
        "bad-word",
        "bad-word-text",
        "mode",
        "lenience",
        "max-new-tokens",
        "n",
        "stop",
    ),
    *("min-new-tokens", "stop-id", "include-stop", "json-schema", "regex", "grammar", "choices", "show-special-tokens"),
    *("stop", "literal-prompt", "echo", "logprobs", "config", "timeout", "key-file", "ca"),
)


def panels(*words: str) -> dict[str, list[str]]:
    """The groups of a command's help by title, with the names in the first column of each, in their order."""
    output = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    parts = re.split(r"╭─ (.+?) ─+╮", output)[1:]
    titles, texts = parts[::2], parts[1::2]
    return {
        title: re.findall(r"^│ (?:\*  *)?-{0,2}([a-z][\w-]*) ", text, re.MULTILINE)
        for title, text in zip(titles, texts, strict=True)
    }


def test_help_of_generate_is_in_groups():
    """An option that is in no group is of the call itself: where it goes, and the session that it continues."""
    found = panels("generate")
    assert set(found) == {"Arguments", "Options", "Sampling", "Structure", "Speculation", "Output"}
    options = {"address", "local", "config", "model", "session", "keep-session", "timeout", "key-file", "ca", "help"}
    assert set(found["Options"]) == options
    assert set(found["Structure"]) == {"json-schema", "regex", "grammar", "choices"}
    for name, declared in OPTIONS.items():
        if declared.flags is None and name not in PARTS:
            panel = "Options" if declared.group is OptionGroup.REQUEST else declared.group.capitalize()
            assert name.replace("_", "-") in found[panel]


def test_help_of_bench_shows_those_of_ones_own_pair_first():
    (_, own, bundled) = panels("bench").values()
    assert own == ["speed", "load"] and set(bundled) == slow_commands.BUNDLED.keys()


DRAFTER_OPTIONS = (
    *("data", "target", "pattern", "field", "kind", "size", "layers", "width", "from", "minutes", "steps", "pretrain"),
    *("row-tokens", "seed", "out", "write", "threads", "resume", "compile"),
)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ("out", "minutes", "seed", "resume", "threads", "stop-after", "only")),
        ("drafter", DRAFTER_OPTIONS),
    ],
)
def test_help_of_training_names_every_option(command: str, options: tuple[str, ...]):
    output = CliRunner().invoke(cli.app, ["train", command, "--help"], env={"COLUMNS": "200"}).stdout
    assert not [option for option in options if f"--{option} " not in output]


def test_the_command_does_not_import_torch_and_sets_the_numeric_environment():
    show = "print('torch' in sys.modules, os.environ['MKL_CBWR'], os.environ['OMP_WAIT_POLICY'])"
    code = f"import cluster.cli, os, sys; {show}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "AUTO,STRICT", "passive"]


async def test_generate_writes_only_the_text_to_stdout(address: str):
    done = await run("generate", PROMPT, "--address", address, "--max-new-tokens", "20")
    assert done.exit_code == 0
    assert done.stdout == bytes(plain_answer(IDS, Sampling(), 20)).decode(errors="replace") + "\n"
    assert "tokens/s" in done.stderr


async def test_generate_prints_the_statistics_of_the_answer(address: str):
    words = ("--speculation", "1,1,1", "--max-new-tokens", "10", "--max-nodes", "3", "--draft-deadline-ms", "400")
    done = await run("generate", PROMPT, "--address", address, *words)
    for line in (
        "10 tokens in 3 rounds, 3.33 a round",
        "guesses: 9 drafted, 8 accepted, 1 discarded",
        "shapes, by fixed: (1,1,1) x 3",
        "tokens of a round: 2 in 1, 4 in 2 rounds",
    ):
        assert line in done.stderr


async def test_the_options_of_generate_reach_the_request(address: str):
    words = ("--policy", "paper_ucb", "--max-nodes", "3", "--draft-deadline-ms", "400", "--max-new-tokens", "9")
    output = json.loads((await run("generate", PROMPT, "--address", address, "--json", *words)).stdout)
    assert output["speculation"]["policy"] == "paper_ucb"
    assert set(output["speculation"]["rounds_by_shape"]) == {"off", "(1,1,1)"}


async def test_generate_scores_a_prompt_alone(address: str):
    words = ("generate", PROMPT, "--address", address, "--max-new-tokens", "0", "--echo", "--logprobs", "1")
    printed, output = await run(*words), json.loads((await run(*words, "--json")).stdout)
    text, *lines = printed.stdout.splitlines()
    assert printed.exit_code == 0 and text == PROMPT and len(lines) == len(IDS)
    assert (output["token_ids"], output["text"], output["finish"]) == ([], "", "length")
    (echoed,) = output["prompt"]
    assert echoed["token_ids"] == IDS and echoed["text"] == PROMPT and len(echoed["logprobs"]) == len(IDS)


async def test_words_and_special_tokens_reach_the_request(monkeypatch: pytest.MonkeyPatch):
    peers = EdgePeers()
    server = await serve_router(ingress(peers))
    try:
        monkeypatch.setattr("tests.support.edge.next_token", lambda ids, sampling: END)
        words = ("--bad-word", "5,6", "--bad-word-text", "ab", "--logit-bias", "7:1", "--logit-bias-text", "::2")
        words = (*words, "--show-special-tokens", "--literal-prompt", "--echo")
        done = await run("generate", PROMPT, "--address", server.address, *words)
    finally:
        await server.stop()
    sampling = peers.texts[-1].sampling
    assert sampling.bad_words == ((5, 6), (97, 98), (32, 97, 98)) and sampling.logit_bias == ((7, 1.0), (58, 2.0))
    assert done.stdout.strip().endswith("<end>")


async def test_the_first_stop_id_ends_the_answer(address: str):
    answer = plain_answer(IDS, Sampling(), 20)
    words = ("--stop-id", str(answer[6]), "--stop-id", "299", "--json")
    output = json.loads((await run("generate", PROMPT, "--address", address, *words)).stdout)
    assert (output["token_ids"], output["finish"]) == (answer[: answer.index(answer[6]) + 1], "stop_token")


async def test_generate_json_is_one_object_with_all_fields(address: str):
    words = ("--temperature", "0.8", "--seed", "7", "--speculation", "2,1", "--max-new-tokens", "12", "--keep-session")
    done = await run("generate", PROMPT, "--address", address, "--json", *words)
    output = json.loads(done.stdout)
    assert output["token_ids"] == plain_answer(IDS, Sampling(temperature=0.8, seed=7), 12)
    assert (output["seed"], output["finish"], output["completion_tokens"]) == (7, "length", 12)
    assert set(output["speculation"]["rounds_by_shape"]) == {"(2,1)"} and output["session"]
    account = SpeculationStats(
        **{name: value for name, value in output["speculation"].items() if name != "tokens_per_s"}
    )
    assert account.rounds == len(output["rounds"]) and account.policy == "fixed"
    assert account.drafted_tokens == account.accepted_tokens + account.discarded_tokens == 4 * account.rounds
    two = await run("generate", " on", "--address", address, "--json", "--session", output["session"])
    assert json.loads(two.stdout)["prompt_tokens"] == len(IDS) + 12 + 3


@pytest.mark.parametrize(
    "words, message",
    [
        (["generate", "x", "--address", "ADDRESS", "--temperature", "-1"], "temperature: "),
        (["generate", "x", "--address", "ADDRESS", "--speculation", "wide"], "speculation.shape: "),
        (["generate", "x", "--address", "ADDRESS", "--policy", "best"], "speculation.policy: "),
        (["generate", "x", "--address", "ADDRESS", "--draft-deadline-ms", "0"], "speculation.deadline_ms: "),
        (["generate", "x", "--address", "ADDRESS", "--repetition-penalty", "0"], "repetition_penalty: "),
        (["generate", "x", "--address", "ADDRESS", "--presence-penalty", "nan"], "presence_penalty: "),
        (["generate", "x", "--address", "ADDRESS", "--frequency-penalty", "101"], "frequency_penalty: "),
        (["generate", "x", "--address", "ADDRESS", "--logit-bias", "5"], "--logit-bias: '5' is not of the form"),
        (["generate", "x", "--address", "ADDRESS", "--logit-bias", "5:900"], "logit_bias[5]: "),
        (["generate", "x", "--address", "ADDRESS", "--ban", "300"], "banned_ids: 300 is outside"),
        (["generate", "x", "--address", "ADDRESS", "--allow", "9", "--ban", "9"], "allowed_ids: may leave no token"),
        (["generate", "x", "--address", "ADDRESS", "--bad-word", "5,"], "--bad-word: '5,' is not of the form"),
        (["generate", "x", "--address", "ADDRESS", "--bad-word", "5", "--bad-word", "6,300"], "bad_words[1]: 300"),
        (["generate", "x", "--address", "ADDRESS", "--bad-word-text", ""], "bad_words['']: is empty"),
        (["generate", "x", "--address", "ADDRESS", "--logit-bias-text", "ab:2"], "logit_bias['ab']: has 2 tokens"),
        (["generate", "x", "--address", "ADDRESS", "--logit-bias-text", "ab"], "--logit-bias-text: 'ab' is not of"),
        (["generate", "x", "--address", "ADDRESS", "--logit-bias-text", ":::900"], "logit_bias['::']: has 2 tokens"),
        (["generate", "x", "--address", "ADDRESS", "--min-new-tokens", "129"], "min_new_tokens: is 129"),
        (["generate", "x", "--address", "ADDRESS", "--local"], "--local: "),
        (["generate", "caf\udce9", "--address", "ADDRESS"], "prompt: has a surrogate code point"),
        (["generate", "x", "--address", "ADDRESS", "--stop", "caf\udce9"], "stop[0]: has a surrogate code point"),
        (["demo", "--local", "--prompt", "caf\udce9"], "--prompt: has a surrogate code point"),
        (["generate", "x", "--address", "caf\udce9"], "address: must be printable ASCII"),
        (["generate", "x", "--logprobs", "-1"], "logprobs: "),
        (["generate", "x", "--timeout", "-1"], "--timeout: must be a positive, finite number of seconds"),
        (["generate", "x", "--keep-session"], "--keep-session: needs a store that outlives the command"),
        (["generate", "x", "--keep-session", "--local"], "--keep-session: needs a store"),
        (["check", "--json", "/dev/null/r.json"], "--json: /dev/null/r.json cannot be written; name a file in"),
        (["certify", "--json", "/"], "--json: / cannot be written"),
        (["certify", "--markdown", "/"], "--markdown: / cannot be written; name a file in"),
        (["tune", "--markdown", "/dev/null/r.md"], "--markdown: /dev/null/r.md cannot be written"),
        (["bench", "speed", "--markdown", "/"], "--markdown: / cannot be written"),
        (["bench", "speed", "--plot", "/dev/null/r.png"], "--plot: /dev/null/r.png cannot be written"),
        (["bench", "speed", "--plot", "r.txt"], "--plot: r.txt must end in one of "),
        (["bench", "load", "--plot", "found"], "--plot: found must end in one of"),
        (["generate", "x", "--config", "nowhere.yaml"], "config: there is no file nowhere.yaml"),
    ],
)
async def test_bad_input_is_one_line_and_status_2(
    address: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["dendro", *(word.replace("ADDRESS", address) for word in words)])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


async def test_a_cluster_that_does_not_answer_is_one_line_at_the_deadline(monkeypatch, capsys):
    # With each look at the clock 10 s of the request's time have passed: a few calls use it up, however long they take.
    monkeypatch.setattr("dendro.attempts.WARNED_AFTER_S", 1000.0)
    monkeypatch.setattr("dendro.progress.Attempts", lambda timeout_s: Attempts(timeout_s, count(0.0, 10.0).__next__))
    monkeypatch.setattr(sys, "argv", ["dendro", "generate", "x", "--address", "127.0.0.1:1", "--timeout", "100"])
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(cli.main)
    shown = capsys.readouterr().err
    assert ended.value.code == 1 and len(shown.splitlines()) == 1
    assert "no complete answer within 100 s; the last call: the stream broke: " in shown


def printed_to(output: int) -> subprocess.CompletedProcess[str]:
    """A command whose output goes to a file descriptor, through Python's buffer."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "cluster.cli", "--version"]
    return subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, env=buffered)


def test_output_that_cannot_be_written_is_one_line_and_status_1():
    with open("/dev/full", "w") as full:
        done = printed_to(full.fileno())
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")


def test_a_command_whose_reader_has_left_ends_without_a_line():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = printed_to(writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_serve_refuses_a_bad_configuration_before_starting_anything():
    words = [sys.executable, "-m", "cluster.cli", "serve", "nowhere.yaml"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: config: there is no file nowhere.yaml"]


async def test_demo_shows_two_turns_with_chosen_shapes_and_restored_tokens(monkeypatch: pytest.MonkeyPatch):
    places = EdgePeers()

    @asynccontextmanager
    async def client(*_: object):
        yield LocalClient(ingress(places))

    monkeypatch.setattr(cli, "_own_client", client)
    monkeypatch.setattr(cli, "descendants", frozenset)
    monkeypatch.setattr(real_pair, "SMOLLM2", "package:no_such_package/a.gguf")
    done = await run("demo", "--prompt", PROMPT, "--max-new-tokens", "12")
    assert done.exit_code == 0, done.output
    for line in (
        "demo of the bundled pair (",
        "Turn one.",
        "Turn two",
        "drafted, ",
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


async def test_demo_fails_if_a_process_remains(orphan: int, monkeypatch: pytest.MonkeyPatch):
    @asynccontextmanager
    async def client(*_: object):
        yield LocalClient(ingress(EdgePeers()))

    monkeypatch.setattr(cli, "_own_client", client)
    monkeypatch.setattr(cli, "SHUTDOWN_S", 0.05)
    monkeypatch.setattr(real_pair, "SMOLLM2", "package:no_such_package/a.gguf")
    done = await run("demo", "--prompt", PROMPT, "--max-new-tokens", "4")
    assert done.exit_code == 1 and f"({orphan})" in done.stderr


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)  # the whole test took 72 s alone; starting alone more than 100 s beside another Ray
@pytest.mark.parametrize("number", few_of([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_serve_ends_cleanly_on_a_signal(number, tmp_path):
    """With status 0 and no remaining process; Ray's own handler would end the process on SIGTERM."""
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
        http = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{http}/v1/models", timeout=30) as models:
            assert json.load(models)["data"][0]["id"] == "demo"
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(120) == 0
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left
