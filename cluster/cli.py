"""The command `dendro`. Each command imports what it needs when it runs; nothing here imports torch.

Environment variables are set before other imports, as libraries read them when they are imported: for those that
arithmetic depends on see CONTRIBUTING.md, "Numbers on a CPU".
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# gRPC's handlers of a fork may crash the child where a thread calls gRPC meanwhile: then Ray, for one, does not start.
# Children of ours call gRPC after they have begun another program alone, and need no handlers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import asyncio
import contextlib
import errno
import importlib
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import typer
from dendro.answer import build_request, collect_samples
from dendro.arguments import seconds_of, text_of
from dendro.chat import Chat
from dendro.client import TIMEOUT_S, Asking, AsyncClient
from dendro.errors import BadRequest, DendroError, NotFound
from dendro.options import Options
from rich.console import Console

from cluster.command_options import (
    Authority,
    ConfigArgument,
    ConfigOption,
    JsonFile,
    KeyFile,
    Local,
    Routers,
    TargetName,
    Timeout,
    given_config,
    given_credentials,
    given_key,
    write_report,
)
from cluster.config import Config
from cluster.key_commands import keys
from cluster.replaced_files import replace_text
from cluster.request_options import options_given, takes_request_options
from cluster.running import descendants, local_client, running_cluster, survivors
from cluster.showing import (
    RoundsPrinter,
    account_lines,
    answer_line,
    as_json,
    logprob_lines,
    on_output,
    sample_text,
    tour,
    visible,
)
from cluster.slow_commands import add_measuring, bench, train
from cluster.tables import page
from cluster.versions import print_version

app = typer.Typer(
    name="dendro",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(train, name="train")
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")

errors = Console(stderr=True)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Lossless tree speculative decoding with Mamba drafters, served on Ray. Without a configuration
    commands work on the bundled pair; `chat` and `demo` on SmolLM2-135M-Instruct where its package is installed."""


SHUTDOWN_S = 15.0


def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)


Result = TypeVar("Result")


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command to its end. A SIGTERM ends it as Ctrl-C does, so that everything that it started is stopped."""

    async def main() -> Result:
        task = asyncio.ensure_future(work)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel_once, task)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """Cancel a task; a later signal does not interrupt what it stops then."""
    if not task.cancelling():
        task.cancel()


@asynccontextmanager
async def _client(
    config: Path | None,
    address: str,
    local: bool,
    timeout_s: float = TIMEOUT_S,
    key_file: Path | None = None,
    authority: Path | None = None,
) -> AsyncIterator[Asking]:
    """A client of the cluster at `address`; else, where `local`, of engines in this process; else of a cluster that is
    started here and ends with the context."""
    if address and local:
        raise BadRequest("--local", "cannot be given together with --address")
    if address:
        if config is not None:
            raise BadRequest("--config", "belongs to a cluster that is started here; --address names a running one")
        async with _far_client(address, timeout_s, key_file, authority) as client:
            yield client
    else:
        for option, value in (("--key-file", key_file), ("--ca", authority)):
            if value is not None:
                raise BadRequest(option, "belongs to --address; a cluster that is started here needs neither")
        async with _own_client(given_config(config), local, timeout_s) as client:
            yield client


def _far_client(address: str, timeout_s: float, key_file: Path | None, authority: Path | None) -> AsyncClient:
    return AsyncClient(address, key=given_key(key_file), timeout_s=timeout_s, credentials=given_credentials(authority))


@asynccontextmanager
async def _own_client(config: Config, local: bool, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Asking]:
    """A client of engines in this process, where `local`; else of a cluster. Both end with the context."""
    if local:
        async with local_client(config) as near:
            yield near
    else:
        async with (
            running_cluster(config.private()) as started,
            AsyncClient(started, proxy=False, timeout_s=timeout_s) as client,
        ):
            yield client


@app.command()
def serve(
    config: ConfigArgument = None,
    ray: Annotated[
        str, typer.Option(help="A running Ray, such as `auto`. Default: one is started here, and stopped at the end.")
    ] = "",
) -> None:
    """Serve a cluster until Ctrl-C; prints the addresses that clients call, over gRPC and over HTTP."""
    _log_to_stderr(logging.INFO)

    async def run() -> None:
        stop, task = asyncio.Event(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, _cancel_once, task)
        checked = given_config(config)
        from cluster.deploy import http_address

        async with running_cluster(checked, ray) as address:
            for number in (signal.SIGINT, signal.SIGTERM):  # a signal before this ends the start
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            http = await asyncio.to_thread(http_address, checked)
            print(address, http, sep="\n", flush=True)
            errors.print(f"serving {', '.join(checked.targets)} at {address} and {http}; Ctrl-C stops it")
            await stop.wait()
            errors.print("stopping")

    _run(run())


@app.command("config")
def write_config(
    config: Annotated[Path, typer.Argument(help="A cluster's YAML file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file. Default: standard output.")] = None,
) -> None:
    """Write Ray Serve's own configuration of a cluster, for `serve deploy` and KubeRay.

    Relative folders become absolute: they must be at the same path on every node. Revisions of names on the hub become
    commits, which every node fetches. The file must name a Redis and a port for gRPC.
    """
    from cluster.hub import pinned
    from cluster.serve_config import as_yaml

    text = as_yaml(pinned(given_config(config)))
    if output is None:
        print(text, end="")
    else:
        replace_text("--output", output, text)


@app.command()
def check(
    config: ConfigArgument = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load every model, one after the other, and check its rows.")
    ] = True,
    ray: Annotated[
        str,
        typer.Option(help="Ray's address, as for `dendro serve`; ports and accelerators here are not checked."),
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Check, before anything is started, whether a configuration can be served here: which drafter fits which target,
    the memory, the exactness on this processor, the arms of each target, ports and accelerators. Exit status 2 where it
    cannot."""
    checked, show_line = given_config(config), lambda line: errors.print(line, style="dim", markup=False)
    from cluster.checking import as_report, examine, show  # imports torch, which takes seconds

    timer = importlib.import_module("cluster.measure.engine_times").WorthTimer() if load else None
    report = examine(checked, load, show_line, timer, here=not ray)
    show(page(), report)
    if json_file is not None:
        write_report(json_file, as_report(report))
    if report.problems:
        raise typer.Exit(2)


@app.command()
@takes_request_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    address: Annotated[str, typer.Option(help="A running cluster, host:port. Default: one is started.")] = "",
    local: Local = False,
    config: ConfigOption = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of the whole answer, with the calls that fail. Not of --local.")
    ] = TIMEOUT_S,
    key_file: KeyFile = None,
    ca: Authority = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object for each answer.", rich_help_panel="Output")
    ] = False,
    **given: Any,
) -> None:
    """Stream an answer; its rounds alternate between two colours."""
    options = options_given(given)
    seconds_of("--timeout", timeout)
    request = build_request(prompt, **options)  # what it refuses is refused before a cluster is started
    if options.get("keep_session") and not address and (local or not given_config(config).redis.url):
        raise BadRequest(
            "--keep-session", "needs a store that outlives the command: give --address, or a --config with redis.url"
        )

    async def run() -> None:
        async with _client(config, address, local, timeout, key_file, ca) as client:
            write = on_output()
            if json or request.n > 1:
                for one in collect_samples([event async for event in client.send(request)]):
                    write(f"{as_json(one) if json else sample_text(one)}\n", "")
                return
            done = await RoundsPrinter(write).show_all(client.send(request))
            for line in logprob_lines(done):
                print(line)
            errors.print(f"[dim]{answer_line(done.complete)}; seed {done.started.seed}[/]", highlight=False)
            for line in account_lines(done.complete):
                errors.print(f"[dim]{line}[/]", highlight=False, soft_wrap=True)
            if done.started.lossy:
                errors.print(f"lossy: mode {done.started.mode} does not keep the target's law", style="yellow")
            if done.complete.session:
                errors.print(f"[dim]session {done.complete.session}[/]", highlight=False)

    _run(run())


@app.command()
def chat(
    where: Annotated[
        str,
        typer.Argument(
            metavar="[ADDRESS|CONFIG]",
            help="A running cluster, host:port, or a YAML file of one to start. Default: the pair of `dendro demo`.",
            show_default=False,
        ),
    ] = "",
    local: Local = False,
    model: TargetName = "",
    system: Annotated[str, typer.Option(help="A message of the role `system` before the first one.")] = "",
    session: Annotated[str, typer.Option(help="Continue this session.", show_default=False)] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Default: drawn.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="The most tokens of an answer.")] = 512,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Of each answer. Not of --local.")] = TIMEOUT_S,
    key_file: KeyFile = None,
    ca: Authority = None,
) -> None:
    """Talk with a model: each line of standard input is a message. Rounds alternate between two colours; /help lists
    the commands, such as /tree and /off. Ctrl-C ends an answer."""
    from cluster.conversation import TerminalChat, converse

    started = not where or Path(where).suffix in (".yaml", ".yml") or Path(where).is_file()
    seconds_of("--timeout", timeout)
    options: Options = {
        "model": model,
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
    }
    build_request("", **options)  # what it refuses is refused before a cluster is started
    text_of("--system", system)
    console = Console(highlight=False)

    async def run() -> None:
        if started and (key_file is not None or ca is not None):
            option = "--key-file" if key_file is not None else "--ca"
            raise BadRequest(option, "belongs to an ADDRESS; a cluster that is started here needs neither")
        if not started:
            connected = _client(None, where, local, timeout, key_file, ca)
        elif where:
            connected = _own_client(Config.load(Path(where)), local, timeout)
        else:
            from cluster.demo.real_pair import chosen_pair

            checked, what = chosen_pair()
            errors.print(f"starting {what} ...", style="dim", markup=False, highlight=False)
            connected = _own_client(checked, local, timeout)
        async with connected as client:
            await converse(TerminalChat(client, console, options, system, session), console, errors)

    _run(run())


@app.command()
def tokenize(
    text: Annotated[str, typer.Argument(help="A prompt that begins a text.")],
    address: Routers,
    model: TargetName = "",
    message: Annotated[bool, typer.Option("--message", help="The text is a user's message of a conversation.")] = False,
    literal_prompt: Annotated[
        bool, typer.Option("--literal-prompt", help="The text of a special token is ordinary text.")
    ] = False,
    timeout: Timeout = 30.0,
    key_file: KeyFile = None,
    ca: Authority = None,
) -> None:
    """Print the token ids of a prompt."""
    prompt = Chat([{"role": "user", "content": text_of("text", text)}]) if message else text

    async def run() -> None:
        async with _far_client(address, timeout, key_file, ca) as client:
            print(*await client.tokenize(prompt, model=model, literal_prompt=literal_prompt))

    _run(run())


@app.command()
def detokenize(
    tokens: Annotated[list[int], typer.Argument(metavar="ID...", help="Token ids.")],
    address: Routers,
    model: TargetName = "",
    show_special_tokens: Annotated[
        bool, typer.Option("--show-special-tokens", help="Special tokens have their text.")
    ] = False,
    timeout: Timeout = 30.0,
    key_file: KeyFile = None,
    ca: Authority = None,
) -> None:
    """Print the text of tokens. On a terminal its control characters are escaped."""

    async def run() -> None:
        async with _far_client(address, timeout, key_file, ca) as client:
            text = await client.detokenize(tokens, model=model, show_special_tokens=show_special_tokens)
            on_output()(f"{text}\n", "")

    _run(run())


def _without_prefix(request: str) -> str:
    """A request's id without what an answer over HTTP has before it."""
    return request.removeprefix(next((each for each in ("chatcmpl-", "cmpl-") if request.startswith(each)), ""))


@app.command()
def abort(
    request: Annotated[str, typer.Argument(help="The id of a request: an answer's `request_id`, or `x-request-id`.")],
    address: Annotated[str, typer.Option(help="The routers, host:port, separated by commas; each is asked.")],
    timeout: Timeout = 30.0,
    key_file: KeyFile = None,
    ca: Authority = None,
) -> None:
    """End a request that runs, at whichever router of the cluster. Exit status 1 where none of that id runs for the
    caller's tenant."""

    async def run() -> int:
        async with _far_client(address, timeout, key_file, ca) as client:
            ended = await client.abort(request)
            bare = _without_prefix(request)
            return ended if ended or bare == request else await client.abort(bare)

    ended = _run(run())
    errors.print(f"{ended} ended", highlight=False)
    if not ended:
        raise typer.Exit(1)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="The id of a request: an answer's `request_id`, or `x-request-id`.")],
    address: Routers,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("explained.html"),
    timeout: Timeout = 30.0,
    key_file: KeyFile = None,
    ca: Authority = None,
) -> None:
    """Write the rounds of a request, with their trees, as one HTML page. Routers keep those of a share of their
    requests: `router.explained_share`."""
    from cluster.explaining import explained_answers
    from cluster.page import explained_page

    async def run() -> None:
        async with _far_client(address, timeout, key_file, ca) as client:
            kept_as = request
            try:
                events = await client.explain(request)
            except NotFound:
                kept_as = _without_prefix(request)
                if kept_as == request:
                    raise
                events = await client.explain(kept_as)
        found = explained_answers(kept_as, events)
        replace_text("--output", output, explained_page(found))
        errors.print(f"{output}: {sum(len(each['rounds']) for each in found)} rounds", markup=False, highlight=False)

    _run(run())


@app.command()
def top(
    addresses: Annotated[
        list[str], typer.Argument(metavar="ADDRESS...", help="Status ports of routers, drafters and verifiers.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the totals since the start, and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once, as one JSON object.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two looks.")] = 2.0,
) -> None:
    """Show what a cluster does: requests, tokens a second, acceptance by arm, where a round's time goes, and replicas.
    Exit status 1 with --once where no status port answers."""
    from cluster.top import checked_addresses, show_live, tables_of, view_once

    ports = checked_addresses(addresses)
    seconds_of("--interval", interval)
    if json and not once:
        raise BadRequest("--json", "belongs to --once")
    if not once:
        with contextlib.suppress(KeyboardInterrupt):
            _run(show_live(page(), ports, interval))
        return
    view = _run(view_once(ports))
    if json:
        print(dumps(view.as_json()))
    else:
        page().print(*tables_of(view), sep="\n")
    if not (view.routers or view.pools):
        raise typer.Exit(1)


@app.command()
def demo(
    config: ConfigOption = None,
    local: Local = False,
    prompt: Annotated[str, typer.Option(help="Default: a question, or a passage without a chat template.")] = "",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens")] = 96,
) -> None:
    """Start a small cluster on Ray Serve with a Redis, of SmolLM2-135M-Instruct or else of the bundled pair; generate
    two turns of a session; show their statistics; stop all processes."""
    from cluster.demo.real_pair import chosen_pair
    from cluster.demo.turns import demo_turns

    console = page()
    text_of("--prompt", prompt)
    checked, what = (given_config(config), str(config)) if config is not None else chosen_pair()
    where = "in this process" if local else "a cluster on Ray Serve, and a Redis"
    console.print(f"[bold]dendro demo[/] of {what}: starting {where} ...")

    async def run() -> frozenset[psutil.Process]:
        async with _own_client(checked, local) as client:
            turns = await asyncio.to_thread(demo_turns, checked, prompt)
            started = descendants()
            await tour(console, client, turns, max_new_tokens)
            console.print("Shutting down ...")
            return started | descendants()

    started = _run(run())
    left = survivors(started, SHUTDOWN_S)
    if left:
        errors.print(f"processes left behind: {', '.join(left)}", style="red", markup=False)
        raise typer.Exit(1)
    console.print(f"All {len(started)} processes that were started have ended.")


add_measuring(app)


def main() -> None:
    """The entry point. A DendroError is printed as one line, and so is an error of the system, such as a full disk;
    exit status 2 for bad input, else 1. A command whose output is a closed pipe ends without a line."""
    try:
        try:
            app()
        finally:
            print(end="", flush=True)
    except DendroError as error:
        _print_error(error)
        sys.exit(2 if isinstance(error, BadRequest) else 1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes at its end what it could not
        if error.errno != errno.EPIPE:
            _print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(error: Exception) -> None:
    errors.print(f"error: {visible(str(error))}", style="red", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
