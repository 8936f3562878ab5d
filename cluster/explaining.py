"""`dendro explain`: the rounds of a request as the data of its page."""

from __future__ import annotations

import dataclasses
from typing import Any

from dendro.answer import complete_from, tree_from
from dendro.v1 import generation_pb2 as pb

CUT = "Later rounds were too many to be kept."
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
    for event in found.events:
        if event.sample not in answers:
            answers[event.sample] = {"request_id": request_id, "sample": event.sample, "model": ""}
            answers[event.sample] |= {"rounds": [], "end": "", "stats": None, "note": ""}
        its = answers[event.sample]
        if event.HasField("started"):
            its["model"] = event.started.model
        elif event.HasField("chunk") and event.chunk.HasField("tree"):
            its["rounds"].append({"text": event.chunk.text, "round": round_fields(event.chunk)})
        elif event.HasField("chunk"):
            its["end"] += event.chunk.text
        elif event.HasField("complete"):
            its["stats"] = dataclasses.asdict(complete_from(event.complete).speculation)
    for each in answers.values():
        each["note"] = CUT if found.cut else "" if each["stats"] is not None else UNFINISHED
    return [answers[sample] for sample in sorted(answers)]
