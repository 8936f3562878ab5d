"""Ray itself as a cluster's start uses it."""

from __future__ import annotations

import gc

import psutil
import pytest
from dendro.errors import EngineFailed

from cluster import deploy
from tests.support.toy_cluster import LOADERS, toy_config


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray's own process objects
def test_a_ray_that_does_not_start_is_one_sentence_and_leaves_no_process(monkeypatch):
    from ray._private import node

    started = node.Node.start_head_processes

    def slow(self):
        started(self)
        raise Exception("The current node timed out during startup.")  # as Ray raises it on a busy machine

    monkeypatch.setattr(node.Node, "start_head_processes", slow)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineFailed, match="ray: did not start: The current node timed out during startup"):
        deploy.start(toy_config(), "redis://127.0.0.1:1", **LOADERS)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    gc.collect()
