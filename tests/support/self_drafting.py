"""A router in this process over a random target that drafts for itself: its guesses are right, except where a drafter
knows less than its target."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer

from cluster.config import Config
from cluster.router.ingress import Ingress
from cluster.running import local_ingress
from tests.support import tiny_hybrids, tiny_models


@asynccontextmanager
async def self_drafting(
    folder: Path, family: str = "llama", tokenizer: Tokenizer | None = None, structures: bool = True
) -> AsyncIterator[Ingress]:
    """tokenizer: the target's; default: one token for each byte   structures: of the drafter's configuration. Rounds
    wait for their drafts on a busy machine, too."""
    count = tiny_models.PADDED if tokenizer is None else tokenizer.get_vocab_size()
    if family == "llama":
        tiny_models.make_checkpoint(folder, vocab_size=count)
    else:
        tiny_hybrids.make_checkpoint(folder, family, vocab_size=count)
        tiny_models.write_tokenizer(folder)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    model = {"checkpoint": str(folder), "dtype": "float32"}
    sections = {
        "targets": {"target": model | {"max_length": 256}},
        "drafters": {"drafter": model | {"structures": structures}},
        "router": {"draft_timeout_ms": 30_000},
    }
    config = Config.of(sections, folder)
    async with local_ingress(config) as router:
        yield router
