"""Each option of a request is declared once; what is typed by hand beside that agrees with the declaration."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import pytest
from dendro.answer import build_request
from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.options import OPTIONS, SAMPLING_NUMBERS, JsonType, NumberBounds, Options, SamplingNumbers
from dendro.speculation import Speculation
from dendro.structure import Structure
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

ROOT = Path(__file__).parents[2]
JSON_TYPES = {
    float: JsonType.NUMBER,
    int: JsonType.INTEGER,
    bool: JsonType.BOOLEAN,
    str: JsonType.STRING,
    Sequence: JsonType.ARRAY,
    Mapping: JsonType.OBJECT,
    Structure: JsonType.OBJECT,
    Speculation: JsonType.OBJECT,
}
NO_OPTIONS = {"text", "token_ids", "chat", "resume", "sampling"}
"""Fields of a request that are its prompt, its resume, or hold options."""
OF_OTHERS = {"bad_word_texts", "logit_bias_texts"}
"""Fields that an option fills beside the one of its own name."""


def fields_of(message: type[pb.GenerateRequest] | type[pb.Sampling] | type[calls_pb2.Sampling]) -> set[str]:
    return {each.name for each in message.DESCRIPTOR.fields}


def test_the_declared_options_are_the_fields_of_the_public_api():
    assert set(OPTIONS) == (fields_of(pb.GenerateRequest) | fields_of(pb.Sampling)) - NO_OPTIONS - OF_OTHERS
    assert all(name == option.name for name, option in OPTIONS.items())


def test_peers_get_every_declared_field_of_a_sampling():
    assert (
        fields_of(calls_pb2.Sampling) == fields_of(pb.Sampling) == {each.name for each in dataclasses.fields(Sampling)}
    )
    assert set(SAMPLING_NUMBERS) < fields_of(pb.Sampling)


def test_a_sampling_has_the_declared_defaults():
    plain = SamplingNumbers()
    declared = {name: OPTIONS[name].default or 0 for name in SAMPLING_NUMBERS}
    assert {name: getattr(plain, name) for name in SAMPLING_NUMBERS} == declared


def test_a_sampling_option_is_named_in_seven_files_one_of_them_in_cluster():
    """Tests, generated code and the argument of another library aside. docs/first-change.md lists the seven."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = [each for each in listed if each.endswith((".py", ".proto", ".md")) and each.split("/")[0] != "tests"]
    generated = ("_pb2.py", "docs/parameters.md", "cluster/measure/llama_cpp.py")
    holding = {
        each for each in ours if not each.endswith(generated) and re.search(r"\bmin_p\b", (ROOT / each).read_text())
    } - {"docs/first-change.md", "docs/certify-openai.md", "docs/certify-llama-cpp.md"}  # the latter's: other servers
    assert len(holding) <= 7, holding
    assert [each for each in holding if each.startswith("cluster/")] == ["cluster/certify/parameters.py"]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_json_type_is_that_of_the_clients_argument(name: str):
    hint = get_type_hints(Options)[name]
    kinds = {get_origin(each) or each for each in (get_args(hint) or (hint,))} - {NoneType}
    if get_origin(hint) in (Sequence, Mapping):
        kinds = {get_origin(hint)}
    assert OPTIONS[name].json_type in {JSON_TYPES[kind] for kind in kinds}


def test_an_option_that_is_not_declared_is_no_argument():
    with pytest.raises(TypeError, match="no option 'tempreature'"):
        build_request("x", tempreature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("ends", "held"), [("[]", [0, 0.5, 1]), ("(]", [0.5, 1]), ("[)", [0, 0.5]), ("()", [0.5])], ids=str
)
def test_bounds_hold_the_numbers_that_their_brackets_say(ends: str, held: list[float]):
    bounds = NumberBounds(0, 1, ends)
    assert [each for each in (-0.1, 0, 0.5, 1, 1.1, float("nan"), float("inf")) if bounds.holds(each)] == held


def test_a_refusal_names_the_field_its_bounds_and_the_number():
    with pytest.raises(BadRequest, match=r"^min_p: must lie in \[0, 1\); got 1\.0$"):
        Sampling(min_p=1.0)
    with pytest.raises(BadRequest, match=r"^logit_bias\[7\]: must lie in \[-100, 100\]; got 101\.0$"):
        Sampling(logit_bias=((7, 101.0),))
