"""Drafters behind bridges, on real engines: no token changes, and nothing of the text is lost at the drafter."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.engine import started
from dendro.errors import BadRequest, NotFound, PeerLost
from dendro.shapes import TreeShape
from dendro.speculation import Speculation
from dendro.state import MemoryStates
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Tokens
from dendro.wire import drafter_call_from, drafter_call_message
from tree_layers.checkpoint import read_facts
from typer.testing import CliRunner

from cluster import cli
from cluster.checking import examine
from cluster.checkpoints import check_pairs, read_cluster
from cluster.config import DEMO_MODELS, Config
from cluster.engines import load_bridge, load_drafter
from cluster.running import local_client
from drafter_service.bridge.drafter import BridgedDrafter
from drafter_service.confidence import Calibration
from drafter_service.engine import DrafterEngine
from drafter_service.structures import DraftStructure
from tests.support import other_tokenizers, tiny_models
from tests.support.sockets import until

pytestmark = pytest.mark.usefixtures("opened_drafters")

TEXT = Path(json.__file__).read_text()
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, seed=11)
PROMPT = [10, 20, 30, 40, 7, 8, 9, 200, 150, 151]
SHAPES = ("(1,1,1,1)", "(2,2,1)", "dynamic(3,4,9)")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A target of 256 byte tokens; the same model with other ids; drafters of other tokenizers."""
    folder = tmp_path_factory.mktemp("bridge")
    tiny_models.make_checkpoint(folder / "target", "llama")
    other_tokenizers.write_permuted(folder / "target", folder / "permuted")
    for name, tokenizer in (
        ("bpe", other_tokenizers.byte_level([TEXT], 300)),
        ("metaspace", other_tokenizers.metaspace([TEXT], 400)),
    ):
        count = tokenizer.get_vocab_size()
        tiny_models.make_checkpoint(folder / name, "llama", seed=3, num_hidden_layers=1, vocab_size=count)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    return folder


def config_of(models: Path, drafter: str, bridge: str = "auto", **more: Any) -> Config:
    shared = {"dtype": "float32", "max_sessions": 4}
    return Config.of(
        {
            "targets": {"t": {"checkpoint": models / "target", "max_length": 256, **shared}},
            "drafters": {"d": {"checkpoint": models / drafter, "bridge": bridge, **shared}},
            "speculation": {"proposers": []},
            "router": {"draft_timeout_ms": 20_000},
            **more,
        },
        models,
    )


async def answers(config: Config, shape: str, temperature: float) -> tuple[list[int], float]:
    """The tokens of an answer, and tokens per round that had the tree it asked for, those past the answer's end too."""
    async with local_client(config) as client:
        done = await client.generate_text(
            PROMPT,
            max_new_tokens=40,
            speculation=Speculation.parse(shape),
            temperature=temperature,
            seed=5,
            ignore_end=True,
        )
        stats = done.complete.speculation
        late = stats.late_drafts  # while the drafter reads the prompt, rounds have no tree and emit one token
        return list(done.token_ids), (stats.emitted_tokens + stats.cut_tokens - late) / (stats.rounds - late)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["(1,1,1,1)", pytest.param("(2,2,1)", marks=pytest.mark.long)])
async def test_the_target_under_other_ids_guesses_all_its_tokens_through_the_intersection(models, shape, temperature):
    """So the text, the ids and, at temperature 1, the noise of every guess are right."""
    config = config_of(models, "permuted", "intersection")
    wanted, alone = await answers(config, "off", temperature)
    found, emitted = await answers(config, shape, temperature)
    assert found == wanted and alone == 1
    assert emitted == TreeShape.parse(shape).depth + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_the_target_under_other_ids_guesses_all_but_the_last_of_a_chain_through_strings(models, temperature):
    """Fewer where the random bytes end inside a UTF-8 character. With another noise it would guess 1 in 100."""
    config = config_of(models, "permuted", "string")
    wanted, _ = await answers(config, "off", temperature)
    found, emitted = await answers(config, "(1,1,1,1)", temperature)
    assert found == wanted and emitted >= 3


@pytest.mark.slow
@pytest.mark.parametrize("bridge", ["string", "intersection"])
@pytest.mark.parametrize("drafter", ["bpe", pytest.param("metaspace", marks=pytest.mark.long)])
async def test_a_drafter_of_another_tokenizer_changes_no_token(models, drafter, bridge):
    config = config_of(models, drafter, bridge)
    async with local_client(config) as client:
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 24, "temperature": temperature, "seed": 5, "ignore_end": True}
            wanted = await client.generate_text(PROMPT, speculation=Speculation.parse("off"), **options)
            for shape in SHAPES:
                found = await client.generate_text(PROMPT, speculation=Speculation.parse(shape), **options)
                assert found.token_ids == wanted.token_ids
                assert found.complete.speculation.drafted_tokens > 0


# ---- the engine behind a bridge ----


class BridgedText:
    """A text at a drafter, in the target's ids."""

    def __init__(self, engine: Any, ids: list[int], tokenizer: str, sampling: Sampling = GREEDY) -> None:
        self.engine, self.text, self.sampling, self.opening, self.sent = engine, Tokens(ids), sampling, new_opening(), 0
        self.tokenizer = tokenizer

    def update(self) -> TextUpdate:
        made = TextUpdate.of(self.opening, self.text, self.sent)
        self.sent = len(self.text)
        return made

    async def open(self, marks: tuple[int, ...] = (), structure: Structure | None = None):
        given = self.sampling, Limits(200), "", marks, 257, self.tokenizer, len(self.text)
        parameters = RequestParameters(*given, structure=structure)
        return await self.engine.open(OpenCall(self.update(), parameters))

    async def draft(self, shape: str):
        return await self.engine.draft(DraftCall(self.update(), TreeShape.parse(shape)))

    @property
    def followed(self) -> DraftStructure | None:
        """The structure that the engine masks its guesses by."""
        return self.engine.engine._scheduler._sessions[self.opening].structure

    async def close(self):
        return await self.engine.close(CloseCall(self.update()))


def loaded(models: Path, drafter: str, bridge: str, states: Any = None) -> tuple[BridgedDrafter, str]:
    """A drafter behind a bridge, and the fingerprint of the target's tokenizer."""
    config = config_of(models, drafter, bridge)
    engine = load_drafter("d", config.drafters["d"], states or MemoryStates(), config.targets)
    assert isinstance(engine, BridgedDrafter)
    return engine, read_facts(models / "target").tokenizer


@pytest.mark.parametrize("bridge", ["string", "intersection"])
async def test_a_structure_is_followed_without_a_bridge_and_not_through_one(models, bridge):
    engine, tokenizer = loaded(models, "bpe", bridge)
    structure = Structure.choices(["ab"])
    async with started(engine):
        plain, through, own = [BridgedText(engine, [5, 6, 7], which, GREEDY) for which in (tokenizer, tokenizer, "")]
        for text, given in ((plain, None), (through, structure), (own, structure)):
            await text.open(structure=given)
        assert through.followed is None and own.followed is not None
        trees = [(await text.draft("(3,2,1)")).tokens.tolist() for text in (plain, through, own)]
        assert trees[0] == trees[1] and 2 <= len(trees[2]) <= 4
        for text in (plain, through, own):
            await text.close()


async def test_a_verifiers_draft_that_is_cancelled_is_a_lost_one(models, monkeypatch):
    engine, tokenizer = loaded(models, "bpe", "string")

    async def never(*given: Any) -> None:
        await asyncio.Event().wait()

    async with started(engine):
        text, delivered, before = BridgedText(engine, [5, 6, 7], tokenizer), [], asyncio.all_tasks()
        await text.open()
        monkeypatch.setattr(engine.engine, "draft", never)
        engine.draft_for(DraftCall(text.update(), TreeShape.parse("(1)")), delivered.append)
        await until(lambda: asyncio.all_tasks() - before)
        (drafting,) = asyncio.all_tasks() - before
        drafting.cancel()
        await until(lambda: delivered)
        assert isinstance(delivered[0], PeerLost)
        await text.close()


@pytest.mark.parametrize("bridge", ["string", "intersection"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_after_any_history_a_tree_is_that_of_a_text_just_opened(models, bridge, sampling, monkeypatch):
    """Cuts, repeated calls, rounds without a draft, and tokens in and outside the last tree."""
    monkeypatch.setattr(Calibration, "learn", lambda self, scores, rank: self)  # shared by all texts
    engine, tokenizer = loaded(models, "bpe", bridge)
    rng = np.random.default_rng(4)
    words = list(TEXT.encode()[:400])
    ids = [tiny_models.byte_tokenizer().encode(chr(byte)).ids[0] for byte in words if byte < 128]
    async with started(engine):
        text = BridgedText(engine, ids[:30], tokenizer, sampling)
        await text.open()
        for step in range(12):
            tree = await text.draft(SHAPES[step % 3])
            fresh = BridgedText(engine, list(text.text.ids), tokenizer, sampling)
            await fresh.open()
            again = await fresh.draft(SHAPES[step % 3])
            await fresh.close()
            assert tree.tokens.tolist() == again.tokens.tolist() and tree.parents.tolist() == again.parents.tolist()
            assert tree.tokens[0] == text.text.ids[-1] and not len(tree.trace)
            if step % 4 == 3:  # the router drops the end of a verdict
                text.text.cut(len(text.text) - int(rng.integers(1, 6)))
                text.sent = min(text.sent, len(text.text))
            path = tree.path_to(tree.rows - 1)[1:] if step % 2 else []
            text.text.extend([int(tree.tokens[row]) for row in path])
            at = len(text.text)
            text.text.extend(ids[at : at + int(rng.integers(1, 5))])
        await text.close()
        assert engine.stats()["bridged"] == engine.sessions == 0


async def test_a_text_is_closed_though_a_verifiers_delayed_call_came_after_the_routers(models):
    engine, tokenizer = loaded(models, "bpe", "string")
    async with started(engine):
        text = BridgedText(engine, PROMPT[:], tokenizer)
        await text.open()
        delayed = DraftCall(TextUpdate.of(text.opening, text.text, 0), TreeShape.parse("(1,1)"))
        text.text.extend([5, 6, 7])
        await text.draft("(1,1)")
        await engine.draft(delayed)
        with pytest.raises(NotFound):
            await text.close()
        await until(lambda: engine.stats()["bridged"] == engine.sessions == 0)


async def test_a_saved_state_is_found_by_a_text_of_another_tokenization(models):
    """A state is named by the drafter's ids, so a text of the same bytes finds it whichever target wrote it."""
    states = MemoryStates()
    engine, tokenizer = loaded(models, "metaspace", "string", states)
    ids = tiny_models.byte_tokenizer().encode(TEXT[:120]).ids
    async with started(engine):
        first = BridgedText(engine, ids, tokenizer)
        assert (await first.open()).restored == 0
        saved = (await first.close()).saved
        assert saved > 0 and len(states.blobs) == 1
        theirs = BridgedText(engine.engine, [1], "")  # without a bridge: the drafter's own ids
        bridge = engine._bridges[tokenizer]
        made = bridge.translation()
        made.follow(ids, 0)
        theirs.text = Tokens(made.tokens.ids)
        theirs.sent = 0
        opened = await theirs.engine.open(OpenCall(theirs.update(), RequestParameters(GREEDY, Limits(200), "", ())))
        assert opened.restored == saved == len(made.tokens) - 1
        await theirs.close()
        longer = BridgedText(engine, [*ids, *ids[:9]], tokenizer)  # a later turn
        assert (await longer.open(marks=(len(ids),))).restored >= saved - 1
        await longer.close()


async def test_a_text_whose_target_needs_no_bridge_is_passed_on(models):
    engine, _ = loaded(models, "permuted", "intersection")
    async with started(engine):
        text, alone = BridgedText(engine, PROMPT, "another tokenizer"), BridgedText(engine.engine, PROMPT, "")
        for each in (text, alone):
            await each.open()
        assert (await text.draft("(2,2)")).tokens.tolist() == (await alone.draft("(2,2)")).tokens.tolist()
        await text.close()
        await alone.close()


async def test_calls_that_do_not_fit_are_refused_and_the_text_goes_on(models):
    engine, tokenizer = loaded(models, "bpe", "string")
    async with started(engine):
        text = BridgedText(engine, PROMPT, tokenizer)
        with pytest.raises(NotFound):
            await text.close()  # never opened
        text.sent = 0
        await text.open()
        with pytest.raises(BadRequest, match="shape"):
            await text.draft("(1," + "1," * 30 + ")")
        assert (await text.draft("(1,1)")).rows >= 1
        wrong = text.update()
        with pytest.raises(NotFound, match="digest"):
            await engine.draft(DraftCall(replace(wrong, digest=wrong.digest ^ 1), TreeShape.parse("(1,1)")))
        text.text.extend([5, 6])
        assert (await text.draft("(1,1)")).tokens[0] == 6
        empty = replace(wrong, opening=new_opening(), base=0, start=0, tokens=(), digest=Tokens().digest())
        with pytest.raises(BadRequest, match="has no root"):
            await engine.open(OpenCall(empty, RequestParameters(GREEDY, Limits(200), "", (), 257, tokenizer)))
        await text.close()
        assert engine.sessions == 0


def test_the_targets_tokenizer_crosses_the_wire():
    call = OpenCall(
        TextUpdate.of(new_opening(), Tokens([1, 2]), 0), RequestParameters(GREEDY, Limits(9), "a", (), 300, "f" * 64)
    )
    assert drafter_call_from(drafter_call_message(1, call)) == call


# ---- configuration ----


@pytest.mark.parametrize(
    "drafter, bridge, made",
    [
        ("bpe", "auto", "string"),
        ("bpe", "intersection", "intersection"),
        ("target", "auto", None),
        ("target", "none", None),
        ("target", "string", "string"),
    ],
)
def test_a_bridge_runs_where_the_tokenizers_differ_or_the_configuration_names_one(models, drafter, bridge, made):
    config = config_of(models, drafter, bridge)
    found = load_bridge("d", config.drafters["d"], "t", config.targets["t"])
    assert (None if found is None else found.kind) == made


def test_without_a_bridge_another_tokenizer_is_refused_by_its_field(models):
    config = config_of(models, "bpe", "none")
    with pytest.raises(BadRequest, match=r"^drafters\.d\.checkpoint: does not fit target t: .*Without a bridge"):
        check_pairs(config, read_cluster(config))


def test_a_bridge_to_a_tokenizer_of_words_is_refused_with_the_reason(models, tmp_path):
    tiny_models.make_checkpoint(tmp_path / "words", "llama")
    words = {f"w{token}": token for token in range(90)}
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": words}}))
    for bridge in ("auto", "string"):
        config = config_of(models, tmp_path / "words", bridge)
        with pytest.raises(BadRequest, match="no bridge can be made for the drafter: its tokenizer is neither"):
            check_pairs(config, read_cluster(config))


def test_an_unknown_bridge_is_refused_by_its_field(models):
    with pytest.raises(BadRequest, match=r"^drafters\.d\.bridge: "):
        config_of(models, "bpe", "magic")


def test_check_and_the_log_say_which_bridge_runs_and_how_many_tokens_are_common(models, caplog):
    config = config_of(models, "bpe")
    (pair,) = examine(config, False, print).pairs
    assert pair.fits and pair.bridge == "string"
    assert (
        "the tokenizers differ" in pair.why and "257 of the drafter's 300 tokens are tokens of the target" in pair.why
    )
    with caplog.at_level(logging.INFO, "dendro"):
        check_pairs(config, read_cluster(config))
        engine = load_drafter("d", config.drafters["d"], MemoryStates(), config.targets)
    assert isinstance(engine, BridgedDrafter) and isinstance(engine.engine, DrafterEngine)
    assert "bridge string, as the tokenizers differ" in caplog.text
    assert "drafter d for target t: bridge string; 257 of the drafter's 300 tokens" in caplog.text


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("bridge", ["string", "intersection"])
def test_certify_keeps_every_promise_with_a_bridge(tmp_path, bridge):
    other_tokenizers.write_permuted(DEMO_MODELS / "mamba2", tmp_path / "other")
    sections = {
        "targets": {"demo": {"checkpoint": str(DEMO_MODELS / "target")}},
        "drafters": {"other": {"checkpoint": str(tmp_path / "other"), "bridge": bridge}},
        "speculation": {"proposers": ["lookup"]},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(sections))
    done = CliRunner().invoke(
        cli.app, ["certify", str(tmp_path / "cluster.yaml"), "--quick", "--local", "--json", str(tmp_path / "r.json")]
    )
    assert done.exit_code == 0, done.output
    promises = json.loads((tmp_path / "r.json").read_text())["promises"]
    assert promises and all(promise["kept"] for promise in promises)
