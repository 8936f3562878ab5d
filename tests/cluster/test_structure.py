"""Structured answers: valid, the same with and without speculation, resumed, and refused by the field's name."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import jsonschema
import pytest
from dendro.answer import Completion, build_request
from dendro.errors import BadRequest, Conflict
from dendro.modes import VerificationMode
from dendro.options import Options
from dendro.speculation import Speculation
from dendro.state import NoStates
from dendro.structure import Structure, StructureForm
from dendro.tasks import AT_ONCE, TenantTurns
from dendro.text import Finish, Limits, Sampling, check_choice
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from cluster.command_options import MOST_FILE_BYTES, given_credentials, given_key
from cluster.config import Config, demo_config
from cluster.engines import load_drafter
from cluster.request_options import structure_given
from cluster.router.ingress import Ingress
from cluster.running import local_client, local_ingress
from cluster.sessions import MemorySessions
from drafter_service.engine import DrafterEngine
from tests.support import other_tokenizers, tiny_models
from tests.support.edge import SERVED, EdgePeers, config, ingress, resume_of
from tests.support.random_schemas import random_schema
from tests.support.self_drafting import self_drafting
from tests.support.sockets import until

PROMPT = "config = json.loads("
WAYS = ("(3,2,1)", "auto", "dynamic(3,3,8)", "proposed(7)")
TOKENS = 192
SOURCE = Path(json.__file__).read_text()


async def asked(client: LocalClient, structure: Structure, way: str, **options) -> Completion:
    given = cast(Options, {"max_new_tokens": TOKENS, "seed": 5, **options})
    done = await client.generate_text(PROMPT, structure=structure, speculation=way, **given)
    assert not done.complete.speculation.contradictions
    return done


async def check_schemas(numbers: range, ways_of_each: int) -> Counter[Finish]:
    """Assert that each answer has the tokens of speculation off and, where it ended by itself, fits its schema."""
    ends: Counter[Finish] = Counter()
    async with local_client(demo_config()) as client:
        for number in numbers:
            schema = random_schema(Random(number))
            structure, temperature = Structure.json_schema(schema), float(number % 2)
            plain = await asked(client, structure, "off", temperature=temperature)
            for way in [*WAYS, *WAYS][number % len(WAYS) :][:ways_of_each]:
                done = await asked(client, structure, way, temperature=temperature)
                assert (done.token_ids, done.text) == (plain.token_ids, plain.text), (number, way)
                assert done.complete.finish is plain.complete.finish
            ends[plain.complete.finish] += 1
            if plain.complete.finish is not Finish.LENGTH:
                jsonschema.Draft202012Validator(schema).validate(json.loads(plain.text))
    return ends


@pytest.mark.slow
async def test_answers_to_random_schemas_are_valid_and_do_not_depend_on_speculation():
    ends = await check_schemas(range(8), 1)
    assert ends[Finish.LENGTH] <= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_answers_to_200_random_schemas_are_valid_and_at_least_95_in_100_end_by_themselves():
    """Only fractions are unbounded in these schemas: a model may add digits up to `max_new_tokens`."""
    ends = await check_schemas(range(200), 2)
    assert ends[Finish.LENGTH] <= 10, ends


STRUCTURES = (
    Structure.regex("[a-c]{3,9}(x|yz)"),
    Structure.choices(["yes", "no", "yes and no", "\u00fc"]),
    Structure.grammar('start: pair ("," pair)~2\npair: "(" /[0-9]{1,2}/ ")"'),
    Structure.json_schema({"type": "array", "items": {"enum": ["ab", 12, None]}, "maxItems": 4}),
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("mamba2", marks=pytest.mark.long)])
async def test_a_resumed_structured_answer_goes_on_with_the_same_tokens(tmp_path: Path, family: str):
    """From every length, the whole included; a peer builds the structure's place from the answer's tokens."""
    async with self_drafting(tmp_path, family) as router:
        client = LocalClient(router)
        for structure in STRUCTURES:
            options = {"temperature": 1.5, "seed": 3, "max_new_tokens": 40}
            whole = await client.generate_text([5, 6], structure=structure, speculation="(2,2)", **options)
            assert whole.complete.finish is Finish.STRUCTURE, whole.text
            for held in range(1, len(whole.token_ids) + 1):
                request = build_request([5, 6], structure=structure, speculation="off", **options)
                request.resume.CopyFrom(
                    resume_of([5, 6], whole.token_ids[:held], whole.started.seed, whole.started.target)
                )
                events = [each async for each in router.generate(request)]
                rest = [token for each in events for token in each.chunk.token_ids]
                assert (*whole.token_ids[:held], *rest) == whole.token_ids
                assert events[-1].complete.finish_reason == pb.FINISH_REASON_STRUCTURE
            wrong = build_request([5, 6], structure=structure, **options)
            wrong.resume.CopyFrom(resume_of([5, 6], [*whole.token_ids[:1], 0], 3, whole.started.target))
            with pytest.raises(BadRequest, match="resume.token_ids: .*does not allow the answer's token 2, 0"):
                [each async for each in router.generate(wrong)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_a_target_that_drafts_for_itself_guesses_every_token_of_a_structured_answer(
    tmp_path: Path, family: str, temperature: float
):
    """A round then emits all levels of its tree and one more token. A drafter that ignores the structure guesses fewer;
    the tokens are the same."""
    rounds: dict[bool, int] = {}
    for structures in (True, False):
        folder = tmp_path / str(structures)
        folder.mkdir()
        async with self_drafting(folder, family, structures=structures) as router:
            client = LocalClient(router)
            for structure in (*STRUCTURES, Structure.json_schema(random_schema(Random(3)))):
                given: Options = {"temperature": temperature, "seed": 3, "max_new_tokens": 60, "structure": structure}
                plain = await client.generate_text([5, 6], speculation="off", **given)
                for way in ("(1,1,1)", "(3,2,1)", "nodes(2,1,0,1)"):
                    done = await client.generate_text([5, 6], speculation=way, **given)
                    assert done.token_ids == plain.token_ids, (structure, way)
                    stats = done.complete.speculation
                    late = stats.late_drafts  # before the drafter has opened the text; such a round emits one token
                    assert not stats.contradictions
                    rounds[structures] = rounds.get(structures, 0) + stats.rounds
                    if structures:
                        assert stats.rounds - late == -(-(len(done.token_ids) - late) // 4), (structure, way)
    assert rounds[False] > rounds[True]


@pytest.mark.slow
async def test_answers_of_a_tokenizer_of_sentencepieces_kind_have_their_structure(tmp_path: Path):
    """Its tokens begin with spaces, and bytes that it lacks are tokens of their own."""
    tokenizer = other_tokenizers.metaspace([SOURCE], 700)
    structures = (*STRUCTURES[1:], Structure.regex("(def|class) [a-z]{1,5}: (\u20ac|\u00fc){2}"))
    async with self_drafting(tmp_path, tokenizer=tokenizer) as router:
        client = LocalClient(router)
        for structure in structures:
            plain, treed = [
                await client.generate_text(
                    "import", structure=structure, speculation=way, temperature=1.5, seed=3, max_new_tokens=60
                )
                for way in ("off", "(2,2)")
            ]
            assert plain.token_ids == treed.token_ids and plain.complete.finish is Finish.STRUCTURE
            if structure.form is StructureForm.CHOICES:
                assert plain.text in structure.texts
            elif structure.form is StructureForm.REGEX:
                assert re.fullmatch(structure.texts[0], plain.text)
            elif structure.form is StructureForm.JSON_SCHEMA:
                jsonschema.validate(json.loads(plain.text), json.loads(structure.texts[0]))
            else:
                assert re.fullmatch(r"\(\d{1,2}\)(,\(\d{1,2}\)){2}", plain.text)


@pytest.mark.slow
async def test_what_ends_a_structured_answer_and_the_turn_after_it(tmp_path: Path):
    async with self_drafting(tmp_path) as router:
        client = LocalClient(router)
        for way in ("off", "(2,2)"):
            given: Options = {"temperature": 1.5, "seed": 3, "speculation": way}
            word = Structure.regex("[a-z]{30}")
            cut = await client.generate_text([5, 6], structure=word, max_new_tokens=7, **given)
            assert cut.complete.finish is Finish.LENGTH and re.fullmatch("[a-z]{7}", cut.text)
            stopped = await client.generate_text([5, 6], structure=word, stop=cut.text[3], **given)
            assert stopped.complete.finish is Finish.STOP_STRING and stopped.text == cut.text.split(cut.text[3])[0]
            ends = await client.generate_text(
                [5, 6], structure=word, stop_ids=[cut.token_ids[4]], max_new_tokens=40, **given
            )
            assert ends.complete.finish is Finish.STOP_TOKEN and ends.token_ids == cut.token_ids[: len(ends.token_ids)]
            endless = Structure.regex("[ab]+")  # may end after any token, but not here
            long = await client.generate_text([5, 6], structure=endless, ignore_end=True, max_new_tokens=50, **given)
            assert long.complete.finish is Finish.LENGTH and re.fullmatch("[ab]{50}", long.text)
            first = await client.generate_text([5, 6], structure=word, keep_session=True, **given)
            assert first.complete.finish is Finish.STRUCTURE
            again = await client.generate_text([7], session=first.complete.session, structure=STRUCTURES[1], **given)
            fresh = await client.generate_text([5, 6, *first.token_ids, 7], structure=STRUCTURES[1], **given)
            assert again.token_ids == fresh.token_ids and again.text in STRUCTURES[1].texts


def test_a_drafter_follows_structures_unless_it_is_configured_otherwise_or_lacks_llguidance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tiny_models.make_checkpoint(tmp_path)
    model = {"checkpoint": str(tmp_path), "dtype": "float32"}
    follows = []
    caplog.set_level(logging.INFO, "dendro.engines")
    for structures, installed in ((True, True), (False, True), (False, False), (True, False)):
        assert not caplog.messages
        if not installed:
            monkeypatch.setitem(sys.modules, "llguidance", None)
        config = Config.of({"targets": {"t": model}, "drafters": {"d": model | {"structures": structures}}}, tmp_path)
        engine = load_drafter("d", config.drafters["d"], NoStates(), config.targets)
        assert isinstance(engine, DrafterEngine)
        follows.append(engine._structures is not None)
    assert follows == [True, False, False, False]
    (line,) = caplog.messages
    assert line.startswith("drafter d: guesses without the structures of answers: following them needs the package")


@pytest.mark.parametrize("name, value", [("banned_ids", [5]), ("allowed_ids", [5]), ("bad_words", [[5, 6]])])
async def test_removed_tokens_are_refused_beside_a_structure(name: str, value):
    request = build_request([1, 2], structure=Structure.regex("a"), **{name: value})
    with pytest.raises(BadRequest, match=f"^{name}: may leave no token that `structure` allows"):
        [each async for each in ingress(EdgePeers()).generate(request)]


async def test_a_least_length_is_refused_beside_a_structure_and_stop_ids_which_it_removes():
    """Before it, a stop token may be the only one that the structure allows: that would leave none to draw."""
    given: Options = {"structure": Structure.regex("ab+"), "min_new_tokens": 3, "max_new_tokens": 8}
    with pytest.raises(BadRequest, match="^min_new_tokens: removes stop_ids, and may so leave no token that `struct"):
        request = build_request([1, 2], stop_ids=[98], **given)
        [each async for each in ingress(EdgePeers()).generate(request)]
    check_choice(Sampling(), Limits(9, min_length=5), 256, (), Structure.regex("ab+"))


@pytest.mark.parametrize("mode", [VerificationMode.MULTI_STEP, VerificationMode.BLOCK, VerificationMode.LENIENT])
def test_a_structure_is_refused_in_the_modes_whose_tokens_depend_on_trees(mode: VerificationMode):
    lenience = 0.5 if mode is VerificationMode.LENIENT else None
    given = {"temperature": 1.0, "mode": mode} | ({"lenience": lenience} if lenience else {})
    with pytest.raises(BadRequest, match=f"^structure: is not enforced in the mode {mode}, in which trees"):
        check_choice(Sampling(**given), Limits(9), 256, (), Structure.regex("a"))
    for allowed in (VerificationMode.COUPLED, VerificationMode.NAIVE):
        check_choice(Sampling(1.0, mode=allowed), Limits(9), 256, (), Structure.regex("a"))


async def test_a_structure_without_a_form_or_for_a_target_without_bytes_is_refused():
    request = build_request([1, 2])
    request.structure.SetInParent()
    with pytest.raises(BadRequest, match="^structure: is empty; give one of json_schema, regex, grammar, choices"):
        [each async for each in ingress(EdgePeers()).generate(request)]
    with pytest.raises(BadRequest, match="^structure: cannot be enforced for the target"):
        request = build_request([1, 2], structure=Structure.regex("a"))
        [each async for each in ingress(EdgePeers()).generate(request)]


@pytest.mark.slow
async def test_a_structure_that_does_not_compile_is_refused_before_anything_runs(tmp_path: Path):
    async with self_drafting(tmp_path) as router:
        for structure, reason in (
            (Structure.json_schema({"type": "strin"}), "structure.json_schema: .*Invalid type"),
            (Structure.regex("a["), "structure.regex: "),
            (Structure.grammar("start: a"), "structure.grammar: "),
        ):
            with pytest.raises(BadRequest, match=f"^{reason}"):
                [each async for each in router.generate(build_request([5, 6], structure=structure))]


def test_the_command_lines_structure_is_one_of_the_options_and_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    assert structure_given(schema, None, None, None) == Structure.json_schema('{"type": "null"}')
    assert structure_given(None, "a", None, []) == Structure.regex("a")
    assert structure_given(None, None, None, None) is None
    with pytest.raises(BadRequest, match="^structure: is given as regex and as choices; give one of them"):
        structure_given(None, "a", None, ["b"])
    with pytest.raises(BadRequest, match="^--grammar: .*missing.* cannot be read"):
        structure_given(None, None, tmp_path / "missing", None)


def test_a_file_of_an_option_that_has_no_end_or_no_text_is_refused_by_the_options_name(tmp_path: Path):
    latin = tmp_path / "latin"
    latin.write_bytes(b"k\xe9y")
    for file, reason in ((Path("/dev/zero"), f"has more than {MOST_FILE_BYTES} bytes"), (latin, "is not UTF-8$")):
        with pytest.raises(BadRequest, match=f"^--json-schema: .*{reason}"):
            structure_given(file, None, None, None)
        with pytest.raises(BadRequest, match=f"^--key-file: .*{reason}"):
            given_key(file)
        with pytest.raises(BadRequest, match=f"^--ca: .*{reason}"):
            given_credentials(file)


MANY_OBJECTS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {f"p{place}_{number}": {"type": "integer"} for place in range(24)},
            "additionalProperties": False,
        }
        for number in range(40)
    ]
}
"""After its brace llguidance makes more items than any limit here allows."""


@pytest.mark.slow
async def test_an_answer_whose_structure_reaches_a_limit_ends_with_the_same_error_at_the_same_token_in_each_way(
    tmp_path: Path,
):
    late = {"prefixItems": [{"const": "abcdef"}, MANY_OBJECTS], "items": False, "minItems": 2, "type": "array"}
    seen = set()
    async with self_drafting(tmp_path) as router:
        for way in ("off", "(1,1,1)", "(3,2,1)", "(1,1,1,1,1,1,1,1,1,1)"):
            request = build_request(
                [5, 6],
                structure=Structure.json_schema(late),
                speculation=Speculation.parse(way),
                max_new_tokens=40,
                ignore_end=True,
            )
            tokens: list[int] = []
            with pytest.raises(BadRequest, match="^structure: cannot go on after the answer's first .*items") as caught:
                async for event in router.generate(request):
                    tokens += event.chunk.token_ids
            seen.add((tuple(tokens), str(caught.value)))
            if len(tokens) > 2:  # a resume is refused at the same place for the same reason
                started = await first_event(router, request)
                request.resume.CopyFrom(resume_of([5, 6], tokens[:-1], started.seed, started.target))
                with pytest.raises(BadRequest, match="^structure: cannot go on after") as again:
                    [each async for each in router.generate(request)]
                assert str(again.value) == str(caught.value)
    assert len(seen) == 1 and len(next(iter(seen))[0]) > 8, seen


async def first_event(router: Ingress, request: pb.GenerateRequest) -> pb.GenerateStarted:
    async with aclosing(router.generate(request)) as events:
        async for event in events:
            return event.started
    raise AssertionError("no event")


class CountingGrammar:
    """A grammar whose texts count how often they are read."""

    def __init__(self) -> None:
        self.followed = 0
        self.complete = False

    async def compiled(self, structure: Structure, tenant: str = "") -> CountingGrammar:
        return self

    def text(self, *given: object) -> CountingGrammar:
        return self

    def follow(self, ids: object) -> None:
        self.followed += 1


async def test_the_tokens_of_a_resume_are_read_by_its_structure_after_its_digest_and_its_target_are_compared():
    counted = CountingGrammar()
    served = {"demo": replace(SERVED["demo"], grammars=counted)}
    router = Ingress(config(), EdgePeers(), MemorySessions(), served)
    request = build_request([1, 2], structure=Structure.regex("a*"), speculation="off", max_new_tokens=9)
    [each async for each in router.generate(request)]  # the router has seen the target
    assert counted.followed == 0
    request.resume.CopyFrom(resume_of([1, 3], [5, 6]))
    with pytest.raises(Conflict, match="the text before the answer has changed"):
        [each async for each in router.generate(request)]
    request.resume.CopyFrom(resume_of([1, 2], [5, 6], target="0" * 32))
    with pytest.raises(Conflict, match="^resume.target: the target has changed"):
        [each async for each in router.generate(request)]
    assert counted.followed == 0
    request.resume.CopyFrom(resume_of([1, 2], [5, 6]))
    [each async for each in router.generate(request)]
    assert counted.followed == 1


async def test_a_resumed_structured_answer_is_followed_no_further_once_its_client_has_left():
    """Else a client that resumes and leaves again and again would have a thread of the router work for each time."""
    held, going, lengths = 300, threading.Event(), []

    class SlowGrammar(CountingGrammar):
        def follow(self, ids) -> None:
            lengths.append(len(ids))
            going.wait(20)

    served = replace(SERVED["demo"], grammars=cast(Any, SlowGrammar()))
    router = Ingress(config(), EdgePeers(), MemorySessions(), {"demo": served})
    request = build_request([1], structure=Structure.regex("a*"), max_new_tokens=held + 9)
    request.resume.CopyFrom(resume_of([1], [97] * held))
    work = asyncio.create_task(first_event(router, request))
    await until(lambda: lengths)
    (thread,) = (each for each in threading.enumerate() if each.name == "structure-of-resume")
    work.cancel()
    await asyncio.wait({work})
    going.set()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive() and lengths[-1] < held


async def test_resumed_structured_answers_of_one_tenant_are_followed_a_few_at_a_time():
    """Else as many threads as requests would compete with the router's loop for its processors."""
    going, following = threading.Event(), []

    class WaitingGrammar(CountingGrammar):
        def follow(self, ids) -> None:
            following.append(threading.current_thread())
            going.wait(20)

    served = replace(SERVED["demo"], grammars=cast(Any, WaitingGrammar()))
    router = Ingress(config(), EdgePeers(), MemorySessions(), {"demo": served})
    request = build_request([1], structure=Structure.regex("a*"), max_new_tokens=12)
    request.resume.CopyFrom(resume_of([1], [97] * 9))
    TenantTurns().enter("many")
    work = [asyncio.create_task(first_event(router, request)) for _ in range(40)]
    await until(lambda: len(following) >= AT_ONCE)
    for _ in range(200):  # turns of the loop in which the others would begin
        await asyncio.sleep(0)
    assert len(following) == AT_ONCE
    going.set()
    assert all(await asyncio.gather(*work)) and len(following) == 40


@pytest.mark.slow
async def test_structures_that_are_switched_off_or_over_a_limit_of_the_configuration_are_refused(tmp_path: Path):
    tiny_models.make_checkpoint(tmp_path)
    models = {"targets": {"t": {"checkpoint": str(tmp_path), "max_length": 64}}}
    request = build_request([5, 6], structure=Structure.regex("(a|b){2}"), max_new_tokens=2)
    for section, reason in (
        ({"enabled": False}, "^structure: cannot be enforced for the target 't'"),
        ({"symbols": 1}, "^structure.regex: does not compile: .*[Gg]rammar size"),
    ):
        async with local_ingress(Config.of(models | {"structures": section}, tmp_path)) as router:
            with pytest.raises(BadRequest, match=reason):
                [each async for each in router.generate(request)]
