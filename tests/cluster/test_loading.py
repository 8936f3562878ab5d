"""Published checkpoint layouts are served, with a tokenizer from another folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from dendro.speculation import Speculation

from cluster.certify.checks import LibraryModel
from cluster.checkpoints import check_checkpoints
from cluster.config import Config, pair_config
from cluster.engines import drafts_ahead
from cluster.running import local_client
from tests.support import tiny_mamba, tiny_models

pytestmark = pytest.mark.usefixtures("opened_drafters")


async def test_a_model_without_tokenizer_files_is_served_with_the_configured_tokenizer(tmp_path: Path):
    for name, seed in (("target", 0), ("drafter", 1)):
        tiny_models.make_checkpoint(tmp_path / name, "llama", seed=seed)
    (tmp_path / "words").mkdir()
    for name in ("target", "drafter"):
        (tmp_path / name / "tokenizer.json").unlink()
    tiny_models.write_tokenizer(tmp_path / "words")
    entry = {"tokenizer": "words", "dtype": "float32"}
    fields = {
        "targets": {"t": {"checkpoint": "target", "max_length": 256, **entry}},
        "drafters": {"d": {"checkpoint": "drafter", **entry}},
    }
    async with local_client(Config.of(fields, tmp_path)) as client:
        done = await client.generate_text(
            "abc", max_new_tokens=100, ignore_end=True, speculation=Speculation.parse("2,1")
        )
    assert done.complete.completion_tokens == 100
    assert done.complete.speculation.drafted_tokens > 0


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_certify_compares_a_target_in_state_spaces_own_layout_with_the_librarys_model(tmp_path: Path, family):
    model = tiny_mamba.make_checkpoint(tmp_path / "made", family)
    tiny_mamba.make_state_spaces(tmp_path / "own", model)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(LibraryModel(tmp_path / "own", torch.float32).logits(ids), wanted)
    assert len(LibraryModel(tmp_path / "own", torch.float32).greedy(ids, 4)) == 4


def test_a_missing_tokenizer_is_refused_by_the_tokenizer_field(tmp_path: Path):
    tiny_models.make_model("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(BadRequest, match="no tokenizer that can be read.*`tokenizer:` names another folder") as refused:
        check_checkpoints(pair_config(tmp_path / "target", []))
    assert refused.value.field == "targets.target.checkpoint"
    fields = {"targets": {"t": {"checkpoint": "target", "tokenizer": "nowhere"}}}
    with pytest.raises(BadRequest, match="nowhere: there is no tokenizer that can be read") as refused:
        check_checkpoints(Config.of(fields, tmp_path))
    assert refused.value.field == "targets.t.tokenizer"


@pytest.mark.parametrize(
    "cores, drafter, expected",
    [
        (3, {}, False),  # one thread each of target, drafter and router
        (4, {}, True),
        (4, {"threads": 2}, False),
        (4, {"replicas": 2}, False),
        (64, {"draft_ahead": "off"}, False),
        (1, {"draft_ahead": "on"}, True),
        (64, {"resources": {"gpu": 1}}, False),
        (64, {"resources": {"gpu": 1}, "draft_ahead": "on"}, True),
    ],
)
def test_a_drafter_drafts_ahead_where_its_machine_has_a_core_to_spare(tmp_path, cores, drafter, expected):
    fields = {"targets": {"t": {"checkpoint": "t"}}, "drafters": {"d": {"checkpoint": "d", **drafter}}}
    config = Config.of(fields, tmp_path)
    assert drafts_ahead(config.drafters["d"], config.targets.values(), cores) is expected
