"""Checkpoints as they are published are served: every layout, with a tokenizer from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from dendro.client import Speculation
from dendro.errors import BadRequest

from cluster.checkpoints import check_checkpoints
from cluster.config import Config, pair_config
from cluster.running import local_client


async def test_a_model_without_tokenizer_files_is_served_with_the_tokenizer_that_its_entry_names(tmp_path: Path):
    for name, seed in (("target", 0), ("drafter", 1)):
        tiny_models.make_checkpoint(tmp_path / name, "llama", seed=seed)
    (tmp_path / "words").mkdir()
    for name in ("target", "drafter"):
        (tmp_path / name / "tokenizer.json").unlink()
    tiny_models.write_tokenizer(tmp_path / "words")
    entry = {"tokenizer": "words", "dtype": "float32"}
    said = {
        "targets": {"t": {"checkpoint": "target", "max_length": 256, **entry}},
        "drafters": {"d": {"checkpoint": "drafter", **entry}},
    }
    async with local_client(Config.of(said, tmp_path)) as client:
        done = await client.generate_text("abc", max_new_tokens=8, speculation=Speculation.parse("2,1"))
    assert done.complete.completion_tokens == 8
    assert done.complete.speculation.drafted_tokens > 0


def test_a_missing_tokenizer_is_refused_with_the_field_that_can_name_another(tmp_path: Path):
    tiny_models.make_model("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(BadRequest, match="no tokenizer that can be read.*`tokenizer:` names another folder") as refused:
        check_checkpoints(pair_config(tmp_path / "target", []))
    assert refused.value.field == "targets.target.checkpoint"
    said = {"targets": {"t": {"checkpoint": "target", "tokenizer": "nowhere"}}}
    with pytest.raises(BadRequest, match="nowhere: there is no tokenizer that can be read") as refused:
        check_checkpoints(Config.of(said, tmp_path))
    assert refused.value.field == "targets.t.tokenizer"
