"""A full collection of a serving process does not walk what was loaded, which would hold up all its answers."""

from __future__ import annotations

import gc
from pathlib import Path

from cluster.config import Config
from cluster.running import running
from tests.support import tiny_models


async def test_what_a_server_in_one_process_loaded_is_not_collected_while_it_serves(tmp_path: Path):
    tiny_models.make_checkpoint(tmp_path)
    config = Config.of({"targets": {"target": {"checkpoint": str(tmp_path), "max_length": 64}}}, tmp_path)
    before = gc.get_freeze_count()
    async with running(config, local=True):
        assert gc.get_freeze_count() > before + 1000
    assert gc.get_freeze_count() == 0
