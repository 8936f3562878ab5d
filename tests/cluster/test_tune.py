"""`dendro tune`: ranks predict rounds, fitted costs predict their times, and only a configuration's arms change."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from dendro.answer import SpeculationStats
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.errors import BadRequest
from dendro.shapes import OFF, LevelShape, NodeShape, TreeShape
from dendro.state import MemoryStates
from dendro.text import Limits, Sampling, Text
from typer.testing import CliRunner

from cluster import cli
from cluster.arms import OFF_ARM, Arm
from cluster.config import Config, DrafterConfig, demo_config
from cluster.drafter_figures import accepted
from cluster.measure.bench import cells_of
from cluster.policies import Static
from cluster.policies.replay import round_lengths
from cluster.policies.sequoia import expected_tokens
from cluster.policies.step_time import TargetSteps
from cluster.router.rounds import rounds
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.tune.command import TABLES, TuneSize, facts_of, plans_of, run_tune, tune, verdict_line
from cluster.tune.measuring import (
    LinearCosts,
    Ranker,
    RunAnswer,
    Timed,
    costs_of,
    replayed,
)
from cluster.tune.prompts import choose_prompts
from cluster.tune.tuning import SearchLimits, Tuned, arms_of, as_arm, is_chain, verdicts_of
from cluster.tune.writing import check_writable, config_text, field_of_arms, with_arms, write_arms
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import tiny_models
from tests.support.tuned_pair import configured, make_pair
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

PAST = 8  # the rank of a token that is not among the candidates


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


# Ranks


def test_acceptance_is_counted_at_every_position_and_depth():
    """Ranks 0 1 2: below the three roots are (0 1 2), (1 2) and (2); with two children, rank 2 is no candidate."""
    table = accepted([[0, 1, 2]], depth=3, children=2)
    assert table[0].tolist() == [1 / 3, 1 / 3]
    second = [
        (0 + 32 / 3) / (2 + 32),
        (1 + 32 / 3) / (2 + 32),
    ]  # two rounds came to this depth: one with rank 1, one with 2
    assert table[1] == pytest.approx(second)
    assert table[2] == pytest.approx([(0 + 32 * second[0]) / (1 + 32), (0 + 32 * second[1]) / (1 + 32)])


def test_the_table_of_a_depth_converges_to_the_frequencies_there():
    """Ranks that alternate between 0 and 1: rank 1 follows rank 0 and rank 0 follows rank 1."""
    table = accepted([[0, 1] * 3000], depth=2, children=2)
    assert table == pytest.approx(0.5, abs=1e-3)
    runs = accepted([([0] * 3 + [PAST]) * 2000], depth=5, children=1)[:, 0]
    assert runs[0] == pytest.approx(3 / 4, abs=1e-3) and runs[1] == pytest.approx(2 / 3, abs=5e-3)
    assert runs[3] < 0.01


@pytest.mark.parametrize(
    "shape, lengths",
    [
        (OFF, [1] * 9),
        (LevelShape((1, 1)), [3, 1, 2, 1]),  # the last two positions are too few for a round
        (LevelShape((2, 1)), [3, 3, 1]),
        (NodeShape((2, 0, 1)), [2, 1, 3, 1]),  # the first child has no children, the second has one
        (NodeShape((2, 1)), [3, 2, 1, 1]),
    ],
    ids=str,
)
def test_a_replay_walks_the_tree_as_the_verifier_does(shape: TreeShape, lengths: list[int]):
    assert round_lengths(shape, [0, 0, 5, 1, 0, 4, 3, 0, 0]) == lengths


async def lengths_of(verifier: VerifierEngine, drafter: DrafterEngine, text: Text, shape: TreeShape) -> list[int]:
    """Tokens of each round of the loop on two engines, with no late drafts."""
    opening, held = new_opening(), 0

    def update() -> TextUpdate:
        return TextUpdate.of(opening, text, held)

    class Near:
        async def draft(self, text, arm):
            return await drafter.draft(DraftCall(update(), arm.shape))

        async def verify(self, text, tree):
            nonlocal held
            verdict = await verifier.verify(VerifyCall(update(), tree))
            held = len(text)
            return verdict

    call = OpenCall(update(), RequestParameters(text.sampling, text.limits, "", ()))
    await asyncio.gather(verifier.open(call), drafter.open(call))
    held = len(text)
    lengths = [verdict.length async for verdict in rounds(text, Near(), Near(), Static(Arm.of("drafter", shape)))]
    await asyncio.gather(verifier.close(CloseCall(update())), drafter.close(CloseCall(update())))
    return lengths


async def test_replayed_rounds_are_the_rounds_that_are_run(pair):
    """Round by round, at both temperatures, for chains and trees: docs/design/numbers.md#oracles."""
    target, path = pair
    verifier = VerifierEngine.load(
        target, VerifierOptions(name="t", dtype=torch.float32, max_length=256, max_sessions=2)
    )
    drafter = DrafterEngine.load(path, DrafterOptions(name="d", max_sessions=2), states=MemoryStates())
    ranker = Ranker(DrafterConfig(checkpoint=path, dtype="float32"), "cpu", PAST)
    await verifier.start()
    await drafter.start()
    emitted = set()
    try:
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, seed=11)
            prompt = tuple(range(40, 90))
            plain = Text(prompt, sampling, Limits(len(prompt) + 60, ignore_end=True))
            await lengths_of(verifier, drafter, plain, OFF)
            ranks = ranker.ranks(prompt, plain.answer, sampling)
            assert len(ranks) == 60 and 0 < ranks.count(0) < 60
            for shape in (LevelShape((1, 1, 1)), LevelShape((3, 2, 1)), NodeShape((3, 2, 0, 1, 1, 1, 0, 2))):
                text = Text(prompt, sampling, plain.limits)
                measured = await lengths_of(verifier, drafter, text, shape)
                assert text.answer == plain.answer
                lengths = round_lengths(shape, ranks)
                assert lengths == measured[: len(lengths)] and sum(lengths) > 50
                emitted |= set(lengths)
    finally:
        await drafter.stop()
        await verifier.stop()
    assert len(emitted) > 2, "some guesses were right and some were wrong"


def test_ranks_do_not_depend_on_how_the_text_is_cut(pair, monkeypatch):
    ranker = Ranker(DrafterConfig(checkpoint=pair[1], dtype="float32"), "cpu", PAST)
    sampling = Sampling(temperature=1.0, seed=2)
    prompt, answer = list(range(30)), list(range(60, 100))
    whole = ranker.ranks(prompt, answer, sampling)
    for chunk in (1, 7, 30):
        monkeypatch.setattr("cluster.tune.measuring.CHUNK", chunk)
        assert ranker.ranks(prompt, answer, sampling) == whole


# Costs

FEW, PADDED = TargetSteps((1, 5, 10, 16, 64)), TargetSteps()
TRUE = LinearCosts(500, 900, 40, step_us=8000, step_row_us=90, hops_us=300, off_hops_us=200, target=FEW)


def timed(shape: TreeShape, costs: LinearCosts = TRUE) -> Timed:
    forwards = {"off": (0, 0), "(1,1,1,1)": (4, 4), "(8)": (1, 1), "(6,3,2)": (3, 25), "(3,2,1)": (3, 10)}[str(shape)]
    draft = 0.0 if shape.off else costs.draft_us + costs.level_us * forwards[0] + costs.row_us * forwards[1]
    verify = costs.step({"off": 1, "(1,1,1,1)": 5, "(8)": 10, "(6,3,2)": 64, "(3,2,1)": 16}[str(shape)])
    hops = costs.off_hops_us if shape.off else costs.hops_us
    return Timed(draft, verify, draft + verify + hops + 50, queue_us=50)


@pytest.mark.parametrize(("target", "plain_us"), [(FEW, 8090), (PADDED, 8720)], ids=["few rows", "multiples of 8"])
def test_linear_costs_are_found_again_and_predict_rounds(target: TargetSteps, plain_us: float):
    true = dataclasses.replace(TRUE, target=target)
    shapes = [TreeShape.parse(text) for text in ("off", "(1,1,1,1)", "(8)", "(6,3,2)")]
    found = costs_of({shape: timed(shape, true) for shape in shapes}, target)
    assert found.target == target
    for name in set(LinearCosts.__dataclass_fields__) - {"target"}:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    for shape in (*shapes, TreeShape.parse("(3,2,1)")):
        assert found.round_us(shape) == pytest.approx(timed(shape, true).round_us - 50)
    assert found.cost_ratio == pytest.approx(940 / plain_us)


def test_too_few_shapes_to_fit_the_costs_are_refused():
    with pytest.raises(BadRequest, match="max_rows: and max_depth of the target leave too few shapes"):
        costs_of({shape: timed(shape) for shape in (OFF, LevelShape((1, 1, 1, 1)))}, FEW)


# Arms


def test_a_tree_of_even_levels_is_named_by_their_widths():
    assert as_arm(NodeShape((1, 1, 1))) == LevelShape((1, 1, 1)) and is_chain(as_arm(NodeShape((1,))))
    assert as_arm(NodeShape((3, 2, 2, 2))) == LevelShape((3, 2))
    assert as_arm(NodeShape((2, 1, 1, 0, 1))) == NodeShape((2, 1, 1, 0, 1))
    assert not is_chain(LevelShape((2, 1)))


ARMS = ["off", "(1,1)", "nodes(3,1,1)"]
CLUSTERS, BIGS = ("speculation", "arms"), ("targets", "big", "arms")
WHOLE = """# our cluster
targets:
  big: {checkpoint: models/big}  # the target
speculation:  # how shapes are chosen
  policy: paper_ucb
  arms: ["off", "(1,1,1,1)"]  # by hand
redis:
  url: ""  # embedded
"""
BLOCK = WHOLE.replace(' ["off", "(1,1,1,1)"]', '\n    - "off"\n    - "(2,1)"')
FLUSH = WHOLE.replace(' ["off", "(1,1,1,1)"]', '\n  - "off"\n  - "(2,1)"')
NO_ARMS = WHOLE.replace('  arms: ["off", "(1,1,1,1)"]  # by hand\n', "")
FLOW = "{targets: {big: {checkpoint: models/big}}, speculation: {policy: paper_ucb}}"
NONE = "targets:\n  big: {checkpoint: models/big}\n# the end"
EMPTY = "targets:\n  big: {checkpoint: models/big}\nspeculation:\nredis: {}\n"


@pytest.mark.parametrize(
    "text",
    [WHOLE, BLOCK, FLUSH, NO_ARMS, FLOW, NONE, EMPTY, "{targets: {}}", NONE + "\nspeculation: {}\n"],
    ids=["flow", "block", "flush block", "no arms", "all flow", "no section", "empty section", "bare", "braces"],
)
def test_only_the_arms_change_and_comments_stay(text: str):
    new = with_arms(text, CLUSTERS, ARMS)
    old = yaml.safe_load(text)
    assert yaml.safe_load(new) == old | {"speculation": (old.get("speculation") or {}) | {"arms": ARMS}}
    for line in text.splitlines():
        _, hash_mark, comment = line.partition("#")
        assert hash_mark + comment in new
    assert with_arms(new, CLUSTERS, ARMS) == new


IN_BLOCKS = WHOLE.replace(" {checkpoint: models/big}  #", "\n    # of the target\n    checkpoint: models/big  #")
OWN = WHOLE.replace("checkpoint: models/big", 'checkpoint: models/big, arms: ["off", "(2,1)"]')
OWN_BLOCK = IN_BLOCKS.replace("    checkpoint:", '    arms:\n      - "off"\n      - "(2,1)"\n    checkpoint:')
OWN_EMPTY = IN_BLOCKS.replace("    checkpoint:", "    arms:\n    checkpoint:")


@pytest.mark.parametrize(
    "text",
    [WHOLE, IN_BLOCKS, OWN, OWN_BLOCK, OWN_EMPTY, FLOW, NONE],
    ids=["flow", "blocks", "own", "own in a block", "own, empty", "all flow", "no section"],
)
def test_only_a_targets_own_arms_change_and_comments_stay(text: str):
    new = with_arms(text, BIGS, ARMS)
    old = yaml.safe_load(text)
    assert yaml.safe_load(new) == old | {"targets": {"big": old["targets"]["big"] | {"arms": ARMS}}}
    assert [line.partition("#")[2] for line in new.splitlines() if "#" in line] == [
        line.partition("#")[2] for line in text.splitlines() if "#" in line
    ]
    assert with_arms(new, BIGS, ARMS) == new


@pytest.mark.parametrize("text", [WHOLE, BLOCK, NO_ARMS, NONE])
def test_a_file_of_crlf_lines_keeps_its_line_ends(text: str, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_bytes(text.replace("\n", "\r\n").encode())
    write_arms(file, config_text(file, demo_config()), file, CLUSTERS, ARMS)
    assert file.read_bytes() == with_arms(text, CLUSTERS, ARMS).replace("\n", "\r\n").encode()


def test_yaml_that_cannot_be_edited_safely_is_refused_with_what_to_write():
    merged = "base: &b\n  arms: [off]\nspeculation: *b\ntargets: {}\n"
    with pytest.raises(BadRequest, match=r'write speculation.arms: \["off", "\(1,1\)", "nodes'):
        with_arms(merged, CLUSTERS, ARMS)
    shared = "targets:\n  big: &b {checkpoint: x}\n  other: *b\n"
    with pytest.raises(BadRequest, match=r'write targets.big.arms: \["off", "\(1,1\)", "nodes'):
        with_arms(shared, BIGS, ARMS)


@pytest.mark.parametrize(
    "big, other, field",
    [
        ("", None, CLUSTERS),
        (', arms: ["off"]', None, BIGS),
        ("", "", BIGS),
        (', arms: ["off"]', "", BIGS),
        ("", ', arms: ["off"]', CLUSTERS),
        (', arms: ["off"]', ', arms: ["off"]', BIGS),
    ],
)
def test_new_arms_of_a_target_leave_those_of_other_targets_as_they_are(big: str, other: str | None, field, tmp_path):
    text = f"targets:\n  big: {{checkpoint: x{big}}}\n"
    text += "" if other is None else f"  other: {{checkpoint: y{other}}}\n"
    text += 'drafters: {d: {checkpoint: z}}\nspeculation: {arms: ["(2,1)"]}\n'
    before = Config.of(yaml.safe_load(text), tmp_path)
    assert field_of_arms(before, "big") == field
    after = Config.of(yaml.safe_load(with_arms(text, field, ARMS)), tmp_path)
    assert after.arm_texts("big") == tuple(ARMS)
    if other is not None:
        assert after.arms_of("other") == before.arms_of("other")


@pytest.mark.parametrize(
    "arms",
    [
        '\n    - "off"  # plain\n    - "(2,1)"',
        '\n    - "off"\n    # why\n    - "(2,1)"',
        ' ["off",  # plain\n    "(2,1)"]',
    ],
)
def test_a_list_with_comments_between_its_arms_is_refused(arms: str):
    text = WHOLE.replace(' ["off", "(1,1,1,1)"]', arms)
    with pytest.raises(BadRequest, match=r"the list at arms has comments .* would be lost; write arms: \[\"off\", "):
        with_arms(text, CLUSTERS, ARMS)


def test_no_file_is_overwritten_without_force(tmp_path):
    source, other = tmp_path / "cluster.yaml", tmp_path / "other.yaml"
    source.write_text(WHOLE)
    other.write_text("mine")
    assert check_writable(source, False, None, False) is None
    assert check_writable(source, True, None, False) == source
    assert check_writable(source, False, other, True) == other
    for arguments, message in (
        ((None, True, None, False), "--write: needs a configuration"),
        ((source, True, other, False), "--write: cannot be given together"),
        ((source, False, other, False), "--out: .* is there already; name another file, or give --force"),
        ((source, False, None, True), "--force: belongs to --out"),
        ((source, False, tmp_path / "sub" / "new.yaml", False), "--out: must lie in the folder of"),
    ):
        with pytest.raises(BadRequest, match=message):
            check_writable(*arguments)
    write_arms(source, WHOLE, source, CLUSTERS, ARMS)
    assert source.read_text() == WHOLE.replace('["off", "(1,1,1,1)"]', '["off", "(1,1)", "nodes(3,1,1)"]')
    with pytest.raises(BadRequest, match="has changed while we measured; nothing was written"):
        write_arms(source, WHOLE, other, CLUSTERS, ARMS)
    assert other.read_text() == "mine"


# The command


def plan_for(file: Path, **size: int):
    config = Config.load(file)
    small = {"learned": 2, "timed": 1, "held_out": 1, "tokens": 16} | size
    return config, plans_of(config, "tiny", TuneSize(**small), (0.0, 1.0), SearchLimits(16, 4, 3), seed=0)


def tuned_at(drafter: str, over: dict[str, list[float]], configured: tuple[str, ...] = ()) -> Tuned:
    """The results of trees found, or configured, by their rates over that of `off`, 100 tokens a second, on each
    held-out prompt."""
    found = tuple(TreeShape.parse(name) for name in over if name not in configured)
    tuned = Tuned(drafter, 0.0, [0.5], TRUE, found, [], 0.5)
    prompts = max(map(len, over.values()))
    for name, ratios in ({"off": [1.0] * prompts} | over).items():
        rates = [SpeculationStats(rounds=9, decode_tokens=round(100 * each), decode_us=10**6) for each in ratios]
        tuned.answers[TreeShape.parse(name)] = [RunAnswer((1, 2), (1, 1), each) for each in rates]
    return tuned


def test_no_arm_measured_below_off_is_written_and_the_report_says_so():
    """The medians over off of the trees found at one temperature are 0.85 and 0.80, and at the other 1.2 and 0.9."""
    configured = [OFF_ARM, Arm.parse("noisy:(1,1)"), Arm.parse("lookup:proposed(7)")]
    slow = tuned_at("noisy", {"(1)": [0.7, 0.85, 1.5], "(2)": [0.8, 0.8, 0.8]})
    fast = tuned_at("noisy", {"(1,1)": [1.2, 1.2], "(3)": [0.9, 0.9]})
    assert arms_of(configured, [slow]) == ["off", "proposed(7)"]
    assert arms_of(configured, [slow, fast]) == ["off", "proposed(7)", "(1,1)"]
    lines = [verdict_line(row) for row in verdicts_of([slow, fast])]
    assert lines == [
        "noisy at temperature 0: nothing pays; of all trees, (1) is 0.85 (0.70-1.50) of off",
        "noisy at temperature 0: pays; of all trees, (1,1) is 1.20 (1.20-1.20) of off; not slower than off: (1,1)",
    ]


def test_a_configured_tree_that_is_faster_than_all_found_stays_an_arm():
    configured = [OFF_ARM, Arm.parse("noisy:(1,1)"), Arm.parse("noisy:(2,1)")]
    both = tuned_at("noisy", {"(3)": [1.1], "(1,1)": [1.3], "(2,1)": [1.2]}, configured=("(1,1)", "(2,1)"))
    assert arms_of(configured, [both]) == ["off", "(3)", "(1,1)"]
    assert arms_of(configured, [tuned_at("noisy", {"(3)": [1.3], "(1,1)": [1.1]}, ("(1,1)",))]) == ["off", "(3)"]


def test_trees_without_a_second_round_are_not_judged():
    tuned = tuned_at("noisy", {"(3)": [0.0]})
    assert arms_of([OFF_ARM], [tuned]) == ["off"]
    assert verdict_line(verdicts_of([tuned])[0]) == "noisy at temperature 0: no tree was measured"


def test_prompts_fit_the_target_they_are_for(pair, tmp_path):
    """Without a chat template passages of several kinds; with one, questions; with a file, what is in it."""
    target = Config.load(configured(pair, tmp_path)).targets["tiny"]
    plain = choose_prompts(None, target, "tiny", 6, 16)
    assert plain.source == "of code, prose and edits" and {len(ids) for ids in plain.ids} == {128}
    decode = CheckpointTokenizer(pair[0], "").decode
    texts = list(map(decode, plain.ids))
    assert texts[1].startswith('"""') and "_a:" in texts[2] and not texts[0].startswith('"""')
    (tmp_path / "chat").mkdir()
    tiny_models.write_tokenizer(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    (tmp_path / "chat" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    chatting = target.model_copy(update={"tokenizer": tmp_path / "chat", "max_length": 4096})
    asked = choose_prompts(None, chatting, "tiny", 8, 16)
    assert asked.source == "with a user's questions"
    assert all(decode(ids).startswith("<") and decode(ids).endswith(">") for ids in asked.ids)
    file = tmp_path / "own.jsonl"
    lines = [("a", "one"), ("a", "one"), ("a", "two"), ("b", "x" * 250), ("b", "three")]
    file.write_text("\n".join(json.dumps({"category": kind, "text": text}) for kind, text in lines))
    own = choose_prompts(file, target, "tiny", 3, 16)
    assert list(map(decode, own.ids)) == ["one", "three", "two"], "each once, by turns, and those that fit"
    with pytest.raises(BadRequest, match="prompts: there are 3 prompts of .*own.jsonl for this target, not 4"):
        choose_prompts(file, target, "tiny", 4, 16)


def test_arms_of_several_drafters_name_them_and_those_of_one_do_not():
    configured = [OFF_ARM, Arm.parse("noisy:(1,1)"), Arm.parse("lookup:proposed(7)")]

    def tuned(drafter: str, *shapes: str) -> Tuned:
        return tuned_at(drafter, {shape: [2.0] for shape in shapes})

    one, other = tuned("noisy", "(1,1,1)", "(2,1)"), tuned("small", "(2,1)", "nodes(2,0,1)")
    assert arms_of(configured, [one, one]) == ["off", "proposed(7)", "(1,1,1)", "(2,1)"]
    wanted = ["off", "proposed(7)", "noisy:(1,1,1)", "noisy:(2,1)", "small:(2,1)", "small:nodes(2,0,1)"]
    assert arms_of(configured, [one, other]) == wanted


@pytest.mark.long
async def test_each_drafter_of_a_target_is_tuned_and_its_arms_are_named(pair, tmp_path):
    """The second drafter is the target itself: all its guesses are right, so each chain is accepted whole. A first
    round has no tree where the target opens the text before the drafter does."""
    file = configured(pair, tmp_path)
    sections = yaml.safe_load(file.read_text())
    sections["drafters"]["same"] = {"checkpoint": str(pair[0]), "dtype": "float32"}
    file.write_text(yaml.safe_dump(sections))
    config, plans = plan_for(file)
    assert [plan.drafter for plan in plans] == ["noisy", "same"]
    report = await run_tune(config, plans, True, lambda title, steps: lambda: None)
    assert report["differences"] == [] and report["drafters"] == ["noisy", "same"]
    same = {row["name"]: row for row in report["rows"] if row["drafter"] == "same" and row["temperature"] == 0}
    chain = same["(1,1)"]["measured"]
    late = round(6 * chain["late_share"])  # the answer's 16 tokens take six rounds either way
    assert late <= 1
    assert chain["emitted_per_round"] == pytest.approx(3 - 2 * late / chain["rounds"], abs=1e-4)
    assert {arm.partition(":")[0] for arm in report["arms"]} == {"off", "noisy", "same"}
    assert Config.of(sections | {"speculation": {"arms": report["arms"]}}, tmp_path).speculation.arms


async def test_a_small_run_predicts_replays_and_measures_every_shape(pair, tmp_path):
    config, plans = plan_for(configured(pair, tmp_path))
    bars: dict[str, list[int]] = {}

    def begin(title: str, steps: int):
        bars[title] = [steps, 0]

        def step() -> None:
            bars[title][1] += 1

        return step

    report = await run_tune(config, plans, True, begin)
    assert len(bars) == 6 and all(steps == done for steps, done in bars.values())
    assert report["differences"] == []
    json.dumps(report)
    for temperature in (0.0, 1.0):
        rows = {row["name"]: row for row in report["rows"] if row["temperature"] == temperature}
        assert {"off", "(1,1)", "(2,1)", "beam(2,2)"} <= rows.keys() and any(row["found"] for row in rows.values())
        assert rows["off"]["predicted"]["emitted_per_round"] == 1 == rows["off"]["measured"]["emitted_per_round"]
        assert rows["beam(2,2)"]["predicted"] is None, "its form depends on the drafter"
        for name in ("(1,1)", "(2,1)"):
            assert rows[name]["measured"]["tokens_per_second"]["median"] > 0
            assert 1 <= rows[name]["replayed_emitted_per_round"] <= 3
            assert 1 <= rows[name]["predicted"]["emitted_per_round"] <= 3
        found = max(
            (row for row in rows.values() if row["found"]), key=lambda row: row["predicted"]["tokens_per_second"]
        )
        assert found["rows"] <= 16 and found["depth"] <= 4
        assert (found["name"] in report["arms"]) >= found["pays"]
    assert {row["name"] for row in report["chains"]} >= {"(1,1)"}
    for row in report["chains"]:
        guesses, share = row["guesses"], plans[0].drafter_share
        assert row["emitted_per_round"] == pytest.approx(
            sum(row["acceptance"] ** power for power in range(guesses + 1)), abs=1e-3
        )
        assert share == pytest.approx(1.0)
        assert row["operations"] == pytest.approx((2 * guesses + 1) / row["emitted_per_round"], abs=1e-3)
    assert report["arms"][0] == "off" and set(report) >= {"bench", "machine", "settings", "rows", "aims", "costs"}
    for _, columns, cells in cells_of(TABLES, report):
        assert cells and all(len(each) == len(columns) for each in cells)
    assert any("noisy" in fact for fact in facts_of(report))


def test_what_cannot_be_tuned_is_refused_before_anything_is_loaded(pair, tmp_path):
    file = configured(pair, tmp_path)
    sections = yaml.safe_load(file.read_text())
    for changes, tokens, reason in (
        ({"drafters": {}}, 16, "drafters: none serves the target tiny"),
        ({}, 200, "tokens: 200 after prompts of 128; max_length is 256"),
        ({"router": {"max_new_tokens": 10}}, 16, "tokens: 16; router.max_new_tokens is 10"),
    ):
        file.write_text(yaml.safe_dump(sections | changes))
        with pytest.raises(BadRequest, match=reason):
            plan_for(file, tokens=tokens)
    file.write_text(yaml.safe_dump(sections))
    with pytest.raises(BadRequest, match="prompts: there are .* ask for fewer"):
        plan_for(file, learned=10_000)
    with pytest.raises(BadRequest, match="model: 'large' is not served here"):
        tune(file, target="large")


@pytest.mark.parametrize("targets", [1, 2])
def test_the_command_writes_the_arms_found_and_prints_the_arms_before(pair, tmp_path, targets: int):
    file = configured(pair, tmp_path)
    if targets > 1:
        sections = yaml.safe_load(file.read_text())
        sections["targets"]["other"] = dict(sections["targets"]["tiny"])
        file.write_text("# tiny\n" + yaml.safe_dump(sections, sort_keys=False))
    before = Config.load(file)
    words = ["tune", str(file), "--local", "--quick", "--write", "--temperatures", "0", "--prompts", "1"]
    sizes = ["--held-out", "1", "--tokens", "12", "--max-rows", "8", "--json", str(tmp_path / "report.json")]
    sizes += ["--markdown", str(tmp_path / "tuning.md")]
    done = CliRunner().invoke(cli.app, words + sizes, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    after = Config.load(file)
    assert after.arm_texts("tiny") == tuple(report["arms"])
    assert file.read_text().startswith("# tiny\n")
    if targets > 1:
        assert after.arms_of("other") == before.arms_of("other") and "targets.tiny.arms written" in done.stdout
    else:
        # Measured times decide whether the arm that the file had before is found again.
        assert ("beam(2,2)" in file.read_text()) == ("beam(2,2)" in report["arms"])
        assert "speculation.arms written" in done.stdout
    assert (tmp_path / "tuning.md").read_text().startswith("# dendro tune\n")
    assert "E[N]" in done.stdout and "beam(2,2)" in done.stdout


@pytest.mark.parametrize("differences", [[], ["an answer"]])
def test_the_arms_are_written_before_the_reports_unless_a_tree_changed_tokens(pair, tmp_path, monkeypatch, differences):
    async def run_tune(*_):
        return {"arms": ["off", "(1,1)"], "differences": differences}

    def present(*_):
        raise BadRequest("--json", "the disk is full")

    for name, fake in (("run_tune", run_tune), ("present", present)):
        monkeypatch.setattr(f"cluster.tune.command.{name}", fake)
    monkeypatch.setattr("cluster.tune.command.cells_of", lambda *_: [])
    file = configured(pair, tmp_path)
    before = Config.load(file).arm_texts("tiny")
    with pytest.raises(BadRequest, match="the disk is full"):
        tune(file, write=True, quick=True, prompts=1, held_out=1, tokens=12, max_rows=8, temperatures="0")
    assert Config.load(file).arm_texts("tiny") == (before if differences else ("off", "(1,1)"))


def test_help_of_tune_names_every_option():
    output = CliRunner().invoke(cli.app, ["tune", "--help"], env={"COLUMNS": "200"}).stdout
    names = (
        "target",
        "temperatures",
        "quick",
        "write",
        "out",
        "force",
        "json",
        "markdown",
        "local",
        "prompts",
        "held-out",
    )
    for option in (*names, "prompt-file", "held-out", "tokens", "max-rows", "max-depth", "max-children", "seed"):
        assert f"--{option} " in output


def test_predictions_from_independent_ranks_agree_with_their_replay():
    """Independently drawn ranks: the assumption of Sequoia's program holds, and E[N] is what a long replay emits."""
    generator = torch.Generator().manual_seed(4)
    chances = torch.tensor([0.5, 0.2, 0.1, 0.2])
    ranks = torch.multinomial(chances, 60_000, replacement=True, generator=generator).tolist()
    for shape in (LevelShape((2, 1, 1)), NodeShape((3, 2, 1, 0, 1))):
        predicted = expected_tokens(shape, accepted([ranks], 5, 3))
        assert replayed([ranks], shape) == pytest.approx(predicted, rel=0.01)
