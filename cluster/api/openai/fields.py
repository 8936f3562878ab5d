"""The fields of a request's JSON, made of the declared options of a request and of OpenAI's names for them.

An option has its declared name where OpenAI has no other. A field that is not honoured is refused by name, or is in
ACCEPTED. `null` is as good as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from dendro.answer import Prompt, build_request
from dendro.arguments import shown
from dendro.errors import BadRequest
from dendro.options import OPTIONS, SEED_BITS, JsonType
from dendro.speculation import Speculation
from dendro.structure import Structure, StructureForm
from dendro.v1 import generation_pb2 as pb

from cluster.api.openai.errors import naming
from cluster.router.tokenizer import Tokenizer

Tokenizers = Callable[[str], Tokenizer]
"""The tokenizer of a target by its name, which may be empty."""
TEMPERATURE = 1.0
"""OpenAI's default, where gRPC's is 0."""
MAPPED = frozenset(
    {"max_new_tokens", "seed", "logit_bias", "logprobs", "echo", "structure", "speculation", "session", "keep_session"}
    | {"request_id", "prediction", "trees"}
)
"""Options that have another name or form here, or are fields of one endpoint alone."""
PLAIN = {name: option for name, option in OPTIONS.items() if name not in MAPPED}
"""Options under their declared names, in their declared types."""
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Names of `max_new_tokens`."""
IGNORE_EOS = "ignore_eos"
"""vLLM's name of `ignore_end`, which benchmark clients send."""
EXTENSION = "dendro"
"""The key of fields that OpenAI's API has no place for, in requests and in answers."""
EXTENDED = {name: f"{EXTENSION}.{name}" for name in ("session", "keep_session", "speculation", "trees")}
"""HTTP's names of options that are fields under that key."""
ACCEPTED: Mapping[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "best_of": (1,),
}
"""Fields that are accepted without effect; with the values that are, where others are refused."""
REFUSED = {
    "suffix": "text is continued at its end alone",
    "functions": "is an old form; send `tools`",
    "function_call": "is an old form; send `tool_choice`",
}
"""Fields of OpenAI's API that are refused, with the reason. Other unknown fields are refused, too."""
NEAR, LONGEST_NAME = 0.8, 64
"""The least likeness (difflib's ratio) of an unknown field to the one that its refusal names, and the most characters
of a name that is compared."""
_WORDS = {
    JsonType.NUMBER: (int | float, "a number"),
    JsonType.INTEGER: (int, "a whole number"),
    JsonType.BOOLEAN: (bool, "true or false"),
    JsonType.STRING: (str, "a text"),
    JsonType.ARRAY: (list, "an array"),
    JsonType.OBJECT: (dict, "an object"),
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as its JSON asks for it."""

    message: pb.GenerateRequest
    stream: bool
    include_usage: bool
    names: Mapping[str, str]  # HTTP's names of our fields, for errors


class Fields:
    """The fields of a body, or of an object in it, that were not read yet."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._path = path
        self._read: set[str] = set()  # names that were looked for

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self._left

    def take(self, name: str, *kinds: JsonType) -> Any:
        """The value of a field, which is of one of these types; None where it is absent. Raises BadRequest."""
        self._read.add(name)
        value = self._left.pop(name, None)
        return None if value is None else typed(self._path + name, value, *kinds)

    def finish(self) -> None:
        """Raise BadRequest, naming it, for a field that was not read."""
        for name, value in self._left.items():
            field = self._path + name
            if field in ACCEPTED:
                accepted = ACCEPTED[field]
                if accepted is not None and all(value != each or type(value) is not type(each) for each in accepted):
                    words = " or ".join(map(in_json, accepted))
                    raise BadRequest(field, f"is {in_json(value)}; only {words} is accepted, and has no effect")
            else:
                fault = "is not supported by this server"
                if len(name) <= LONGEST_NAME and (near := get_close_matches(name, sorted(self._read), 1, NEAR)):
                    fault += f"; the nearest name is {self._path}{near[0]}"
                raise BadRequest(shown(field)[1:-1], REFUSED.get(field, fault))


def session_of(body: Mapping[str, Any]) -> str:
    """The session that a body names; empty where it names none, or is refused for what stands there."""
    extension = body.get(EXTENSION)
    found = extension.get("session") if isinstance(extension, dict) else None
    return found if isinstance(found, str) else ""


def in_json(value: object) -> str:
    """A wrong value in an error's words; `true` and `false` as JSON writes them."""
    return shown(value).lower() if isinstance(value, bool) else shown(value)


def typed(field: str, value: Any, *kinds: JsonType) -> Any:
    """The value. Raises BadRequest, naming the field, where it is of none of these types."""
    for kind in kinds:
        if isinstance(value, _WORDS[kind][0]) and isinstance(value, bool) == (kind is JsonType.BOOLEAN):
            return value
    raise BadRequest(field, f"must be {' or '.join(_WORDS[kind][1] for kind in kinds)}; got {in_json(value)}")


def http_request(
    fields: Fields, prompt: Prompt, options: dict[str, Any], request_id: str, names: Mapping[str, str]
) -> HttpRequest:
    """The request of a prompt and options of its endpoint, with all other fields of the body, none of which is left.
    names: HTTP's names of fields of ours, at this endpoint"""
    made: dict[str, Any] = {"temperature": TEMPERATURE, "request_id": request_id} | options
    for name, option in PLAIN.items():
        if name in fields:
            kinds = (JsonType.STRING,) if name == "stop" else ()
            made[name] = fields.take(name, option.json_type, *kinds)
    if made.get("stop") == "":
        raise BadRequest("stop", "is empty; a stop string has at least one character")
    names = {"request_id": "Idempotency-Key", "max_new_tokens": LENGTHS[1], **names}
    for name in LENGTHS:
        if (value := fields.take(name, JsonType.INTEGER)) is not None:
            if made.get("max_new_tokens", value) != value:
                raise BadRequest(name, f"is {value}, and {names['max_new_tokens']} is another number; give one of them")
            made["max_new_tokens"], names = value, names | {"max_new_tokens": name}
    if (ignored := fields.take(IGNORE_EOS, JsonType.BOOLEAN)) is not None:
        if made.get("ignore_end", ignored) != ignored:
            raise BadRequest(IGNORE_EOS, f"is {in_json(ignored)}, and ignore_end is not; give one of them")
        made["ignore_end"] = ignored
    if (seed := fields.take("seed", JsonType.INTEGER)) is not None:
        made["seed"] = seed % (1 << SEED_BITS) if -(1 << SEED_BITS - 1) <= seed < 0 else seed
    if (biases := fields.take("logit_bias", JsonType.OBJECT)) is not None:
        made["logit_bias"] = _biases(biases)
    made |= _structure(fields)
    if "response_format" in fields:
        if "structure" in made:
            raise BadRequest("response_format", "is given beside structure; give one of them")
        names = names | {"structure": "response_format"}
        with naming(names):
            made["structure"] = _format(Fields(fields.take("response_format", JsonType.OBJECT), "response_format."))
    stream = fields.take("stream", JsonType.BOOLEAN) or False
    given = fields.take("stream_options", JsonType.OBJECT)
    if given is not None and not stream:
        raise BadRequest("stream_options", "is given without stream")
    extension = Fields(fields.take(EXTENSION, JsonType.OBJECT) or {}, f"{EXTENSION}.")
    made |= _extension(extension)
    names = names | EXTENDED
    stream_options = Fields(given or {}, "stream_options.")
    include_usage = stream_options.take("include_usage", JsonType.BOOLEAN) or False
    stream_options.take("include_obfuscation", JsonType.BOOLEAN)  # has no effect: no text is added
    for each in (fields, extension, stream_options):
        each.finish()
    with naming(names):
        return HttpRequest(build_request(prompt, **made), stream, include_usage, names)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise BadRequest(f"logit_bias[{shown(text)}]", "is no token id; its keys are token ids in decimal digits")
    return int(text)


def _biases(given: Mapping[str, Any]) -> dict[int, float]:
    """The biases by token id. Raises BadRequest, naming the token, for an id that is given twice: `7` and `07`."""
    found: dict[int, float] = {}
    for text, value in given.items():
        token, field = _token_id(text), f"logit_bias[{shown(text)}]"
        if token in found:
            raise BadRequest(field, f"is the token {token}, which has a bias already")
        try:
            found[token] = float(typed(field, value, JsonType.NUMBER))
        except OverflowError:
            raise BadRequest(field, f"must be a finite number; got {shown(value)}") from None
    return found


def _structure(fields: Fields) -> dict[str, Any]:
    """The option `structure`, an object with one form: `{"regex": "[0-9]+"}`."""
    given = fields.take("structure", JsonType.OBJECT)
    if given is None:
        return {}
    if len(given) != 1 or not given.keys() <= set(StructureForm):
        raise BadRequest("structure", f"must have one of {', '.join(StructureForm)}")
    form, value = StructureForm(next(iter(given))), next(iter(given.values()))
    match form:
        case StructureForm.JSON_SCHEMA:
            schema = typed("structure.json_schema", value, JsonType.OBJECT, JsonType.STRING)
            return {"structure": Structure.json_schema(schema)}
        case StructureForm.CHOICES:
            return {"structure": Structure.choices(typed("structure.choices", value, JsonType.ARRAY))}
        case _:
            return {"structure": Structure(form, (typed(f"structure.{form}", value, JsonType.STRING),))}


def _format(fields: Fields) -> Structure | None:
    """OpenAI's `response_format` as a structure."""
    kind = fields.take("type", JsonType.STRING)
    match kind:
        case "text":
            made = None
        case "json_object":
            made = Structure.json_schema({"type": "object"})
        case "json_schema":
            described = fields.take("json_schema", JsonType.OBJECT)
            if described is None:
                raise BadRequest("response_format.json_schema", "is missing")
            given = Fields(described, "response_format.json_schema.")
            for name in ("name", "description"):  # unused: no model reads them
                given.take(name, JsonType.STRING)
            given.take("strict", JsonType.BOOLEAN)  # a structure is always enforced
            made = Structure.json_schema(given.take("schema", JsonType.OBJECT) or {})
            given.finish()
        case _:
            raise BadRequest("response_format.type", f"is {shown(kind)}; must be text, json_object or json_schema")
    fields.finish()
    return made


def _extension(fields: Fields) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if (session := fields.take("session", JsonType.STRING)) is not None:
        made["session"] = session
    if (keep := fields.take("keep_session", JsonType.BOOLEAN)) is not None:
        made["keep_session"] = keep
    if (trees := fields.take("trees", JsonType.BOOLEAN)) is not None:
        made["trees"] = trees
    given = fields.take("speculation", JsonType.STRING, JsonType.OBJECT)
    if isinstance(given, str):
        made["speculation"] = Speculation.parse(given)
    elif given is not None:
        parts = Fields(given, f"{EXTENSION}.speculation.")
        made["speculation"] = Speculation.parse(
            parts.take("shape", JsonType.STRING) or "",
            parts.take("policy", JsonType.STRING) or "",
            parts.take("max_nodes", JsonType.INTEGER),
            parts.take("deadline_ms", JsonType.INTEGER),
        )
        parts.finish()
    return made
