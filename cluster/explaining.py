"""`dendro explain`: the rounds of a request as the data of its page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from dendro.answer import complete_from, tree_from
from dendro.v1 import generation_pb2 as pb

CUT = "Later rounds were too many to be kept."
MISSING = "Some rounds were not kept by the routers that answered."
UNFINISHED = "The answer had not ended."


def round_fields(chunk: pb.GenerateChunk) -> dict[str, Any]:
    """A round with its tree, as JSON has it. Raises EngineFailed where that is no tree."""
    tree = dataclasses.asdict(tree_from(chunk.tree))
    tree["tree_ids"] = tree.pop("token_ids")
    return {"shape": chunk.shape, "token_ids": list(chunk.token_ids), **tree}


def explained_answers(request_id: str, found: pb.ExplainResponse) -> list[dict[str, Any]]:
    """The answers of a request, each with its rounds. A part without a tree, of a session's record, is the text at the
    end."""
    answers: dict[int, dict[str, Any]] = {}
    tokens: Counter[int] = Counter()  # each answer's tokens up to its last round
    missing: set[int] = set()
    for event in found.events:
        if event.sample not in answers:
            answers[event.sample] = {"request_id": request_id, "sample": event.sample, "model": ""}
            answers[event.sample] |= {"rounds": [], "end": "", "stats": None, "note": ""}
        its = answers[event.sample]
        if event.HasField("chunk"):
            if event.chunk.offset != tokens[event.sample]:
                missing.add(event.sample)
            tokens[event.sample] = event.chunk.offset + len(event.chunk.token_ids)
        if event.HasField("started"):
            its["model"] = event.started.model
        elif event.HasField("chunk") and event.chunk.HasField("tree"):
            its["rounds"].append({"text": event.chunk.text, "round": round_fields(event.chunk)})
        elif event.HasField("chunk"):
            its["end"] += event.chunk.text
        elif event.HasField("complete"):
            if event.complete.usage.completion_tokens != tokens[event.sample]:
                missing.add(event.sample)
            its["stats"] = dataclasses.asdict(complete_from(event.complete).speculation)
    for sample, each in answers.items():
        ended = "" if each["stats"] is not None else UNFINISHED
        each["note"] = CUT if found.cut else MISSING if sample in missing else ended
    return [answers[sample] for sample in sorted(answers)]
