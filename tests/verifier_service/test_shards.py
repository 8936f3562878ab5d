"""A target on several workers: bits at one degree do not depend on the step, and a lost worker ends the replica."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import transformers
from dendro.errors import BadRequest, PeerLost
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE

from tests.support.cases import few_of
from tests.support.engines import engine_of
from tests.support.routers import LAWS, RoundByRound, arrive_at_random
from tests.support.tiny_models import END, PADDED, VOCABULARY, make_checkpoint, randomise, write_tokenizer
from verifier_service import shards
from verifier_service.collectives import WorkerLost
from verifier_service.messages import receive
from verifier_service.shards import Crew, MemoryAccess, Shard, join_leader, load_shard

POISON = 250
"""A token whose embedding is not finite, and so are the logits after it."""
SETTINGS: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
}
FAMILIES: dict[
    str, dict[str, Any]
] = {  # what plans contain: plain slices, tied weights, biases, gathered projections, experts
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Starcoder2": {},
    "Phi3": {},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, num_key_value_heads=4)
    return path


def workers():
    """The child processes that run shards. `multiprocessing` lists a child until it has waited for it itself."""
    listed = [each for each in multiprocessing.active_children() if each.name.startswith("shard")]
    return [each for each in listed if psutil.pid_exists(each.pid)]


async def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", few_of([torch.float32, torch.bfloat16], torch.float32), ids=["fp32", "bf16"])
async def test_random_arrivals_at_one_degree_change_no_token(folder, dtype, degree):
    """With trees, chunks, other texts, waiting and preemption: each text's tokens are those it has alone.

    Every text begins with two pages and needs a third, so that of three that fill the pool the oldest preempts the
    youngest.
    """
    rng = np.random.default_rng(degree)
    engine = engine_of(folder, dtype=dtype, tensor_parallel=degree, pool_tokens=6 * PAGE)
    try:
        await engine.start()
        prompts = [rng.integers(0, 256, int(rng.integers(100, 120))).tolist() for _ in range(8)]
        laws = [LAWS[place % len(LAWS)] for place in range(len(prompts))]
        await arrive_at_random(engine, prompts, laws, 30, rng)
        stats = engine.stats()
        assert stats["guesses"] > 0 and stats["preempted"] > 0
        assert stats["pages_held"] == stats["sessions"] == 0
    finally:
        await engine.stop()
    await until(lambda: not workers(), 10)


@pytest.mark.parametrize("family", few_of(FAMILIES, "Llama", "Mixtral"))
def test_logits_of_two_workers_are_the_librarys_within_2e_3(tmp_path, family):
    config = getattr(transformers, f"{family}Config")(**SETTINGS | FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    engine = engine_of(tmp_path, tensor_parallel=2)
    try:
        ids = [(7 * at * at + 3 * at) % 256 for at in range(75)]
        tree = DraftTree.of([ids[-1], 5, 6, 7], [-1, 0, 0, 1])
        ours = engine.logits_of(ids, tree)
        for row, path in enumerate(([], [5], [6], [5, 7])):
            with torch.inference_mode():
                theirs = model(torch.tensor([ids + path])).logits[0, -1, :VOCABULARY]
            assert (ours[row] - theirs).abs().max() < 2e-3
            assert ours[row].argmax() == theirs.argmax()
        # No worker ever holds the whole model: norms are on all of them, everything else is dealt out.
        held = sum(parameter.numel() for parameter in engine.runner.target.model.parameters())
        assert held < 0.55 * sum(parameter.numel() for parameter in model.parameters())
    finally:
        engine.runner.crew.stop()


async def test_logits_that_are_not_finite_end_their_texts_alone_and_not_the_replica(tmp_path):
    model = make_checkpoint(tmp_path, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, tensor_parallel=2)
    try:
        await engine.start()
        prompt = [(7 * at * at + 3 * at) % 200 for at in range(30)]
        alone = [await RoundByRound(engine, prompt[start:], count=6).finish() for start in (0, 4)]
        for logprobs in (None, 2):
            failing = RoundByRound(engine, [*prompt, POISON], count=6)
            failing.parameters = replace(failing.parameters, logprobs=logprobs)
            texts = [*(RoundByRound(engine, prompt[start:], count=6) for start in (0, 4)), failing]
            *answers, outcome = await asyncio.gather(*(each.finish() for each in texts), return_exceptions=True)
            assert isinstance(outcome, BadRequest) and "first 31 tokens are not finite" in str(outcome)
            assert answers == alone and not engine.fault()
    finally:
        await engine.stop()


def test_each_worker_keeps_the_keys_of_its_own_heads(folder):
    one, four = engine_of(folder, tensor_parallel=1), engine_of(folder, tensor_parallel=4)
    four.runner.crew.stop()
    heads = [engine.runner.target.layouts[0].kv_heads for engine in (one, four)]
    assert heads == [4, 1]
    assert {report.token_bytes for report in four.runner.crew.reports} == {four.runner.target.token_bytes}


def thread_count():
    return len(os.listdir("/proc/self/task"))


def test_without_shared_memory_logits_have_the_same_bits(folder, monkeypatch):
    """As on processors other than x86, where torch's process group exchanges the parts at every step."""
    ids, found = list(range(40)), []
    for shared in (True, False):
        monkeypatch.setattr(shards, "can_share_memory", lambda device, shared=shared: shared)
        engine = engine_of(folder, tensor_parallel=2)
        try:
            assert engine.runner.crew.memory_is_shared is shared
            found.append(engine.logits_of(ids, DraftTree.root_only(ids[-1])))
        finally:
            engine.runner.crew.stop()
    assert torch.equal(*found)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "process group"])
def test_a_stopped_group_leaves_no_threads_and_forked_children_of_other_threads_start(folder, shared, monkeypatch):
    monkeypatch.setattr(shards, "can_share_memory", lambda device: shared)
    before = thread_count()
    engine = engine_of(folder, tensor_parallel=2)
    engine.runner.crew.stop()
    del engine
    gc.collect()
    ends: list[int] = []
    # Like Ray's start, with a function of Python that the child runs before its program.
    fork = threading.Thread(target=lambda: ends.append(subprocess.call(["true"], preexec_fn=lambda: None)))
    fork.start()
    fork.join()
    assert ends == [0] and thread_count() <= before + torch.get_num_threads()


async def test_replicas_of_another_degree_have_another_fingerprint(folder):
    names = []
    for degree in (1, 2):
        engine = engine_of(folder, tensor_parallel=degree)
        names.append((await engine.hello()).fingerprint)
        await engine.stop()
    kind, _, _ = names[0].rpartition("-")  # the digest of what the library computes, which may differ, comes last
    assert names[1].startswith(f"{kind}-") and names[1].endswith("-tp2") and not names[0].endswith("-tp2")


@pytest.mark.parametrize("idle", few_of([False, True], False), ids=["in a step", "between steps"])
async def test_a_worker_that_dies_ends_the_replica_within_seconds(folder, idle):
    engine = engine_of(folder, tensor_parallel=2)
    await engine.start()
    lost = asyncio.create_task(engine.lost())
    try:
        router = RoundByRound(engine, range(40), Sampling(temperature=1.0, seed=5), count=200)
        await router.open()
        pending = None if idle else asyncio.create_task(router.go_on())
        await until(lambda: idle or len(router.text) > 50)
        assert not lost.done() and (idle or not pending.done())
        os.kill(workers()[0].pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            assert "worker 1 of 2" in await lost
            if pending is not None:
                with pytest.raises(PeerLost):
                    await pending
            with pytest.raises(PeerLost, match="worker 1 of 2"):
                await router.round()
            with pytest.raises(PeerLost):
                await RoundByRound(engine, [1]).open()
    finally:
        await engine.stop()
    await until(lambda: not workers(), 10)


def lead(folder, answers):
    """A leader whose process is killed."""
    engine = engine_of(folder, tensor_parallel=2)
    answers.put([child.pid for child in multiprocessing.active_children()])
    engine.logits_of(range(20), DraftTree.root_only(19))
    time.sleep(60)


def test_workers_end_with_their_leader(folder):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    leader = context.Process(target=lead, args=(folder, answers))
    leader.start()
    pids = answers.get(timeout=60)
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(leader.pid, signal.SIGKILL)
    leader.join()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not alive


async def test_heads_that_cannot_be_dealt_out_are_refused_with_the_numbers(folder):
    with pytest.raises(BadRequest, match="4 attention heads cannot be dealt out to 3 workers"):
        engine_of(folder, tensor_parallel=3)
    await until(lambda: not workers(), 10)


async def test_a_family_without_a_plan_is_refused_and_leaves_nothing_behind(tmp_path):
    model = transformers.StableLmForCausalLM(transformers.StableLmConfig(**SETTINGS))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(BadRequest, match="tp_plan"):
        engine_of(tmp_path, tensor_parallel=2)
    await until(lambda: not workers(), 10)


def test_no_worker_leaves_the_process_group_before_all_have_made_it(monkeypatch):
    store, waits, done = dist.HashStore(), threading.Event(), threading.Event()
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)

    def make(rank, check=lambda: None):
        shards._make_group("gloo", rank, 2, store, check)
        done.set()

    first = threading.Thread(target=make, args=(0, waits.set), daemon=True)
    first.start()
    assert waits.wait(20) and not done.is_set()
    make(1)
    first.join(20)
    assert not first.is_alive()


def test_after_a_process_group_that_could_not_be_made_the_next_target_is_loaded(folder, monkeypatch):
    """torch finds the members of a group by the number of groups that each process began."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    shard = Shard(folder, None, torch.float32, "cpu", (8,), 1, 2, ("127.0.0.1", store.port), None)
    monkeypatch.setattr(shards, "GROUP_S", 0.2)
    with pytest.raises(WorkerLost, match="process group cannot be made"):
        load_shard(shard, 0, store, None, lambda: None)
    monkeypatch.setattr(shards, "GROUP_S", 30.0)
    engine_of(folder, tensor_parallel=2).runner.crew.stop()


def test_a_worker_that_does_not_connect_is_reported(monkeypatch):
    monkeypatch.setattr(shards, "JOIN_S", 0.2)
    with pytest.raises(WorkerLost, match="0 of 1 workers connected in 0.2 s"):
        Crew.start(2, lambda invitations: None)


def wrong_key(invitation):
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        join_leader(replace(invitation, key=bytes(shards.KEY_BYTES)))


def plain_bytes(invitation):
    with socket.create_connection((invitation.host, invitation.port)) as stream:
        stream.sendall(invitation.key + bytes([1]) + bytes(64))


def silence(invitation):
    with socket.create_connection((invitation.host, invitation.port)) as stream:
        stream.recv(1024)
        stream.recv(1024)  # until the leader gives up


@pytest.mark.parametrize("stranger", [wrong_key, plain_bytes, silence])
def test_a_connection_that_does_not_prove_it_has_the_key_is_rejected_and_holds_up_no_worker(monkeypatch, stranger):
    monkeypatch.setattr(shards, "HANDSHAKE_S", 1.0)
    joined = []

    def start(invitations):
        def come():
            stranger(invitations[0])
            joined.append(join_leader(invitations[0]))

        threads.append(threading.Thread(target=come))
        threads[0].start()

    threads: list[threading.Thread] = []
    crew = Crew.start(2, start)
    threads[0].join()
    crew.broadcast(MemoryAccess(True))
    assert receive(joined[0], MemoryAccess).opened
    crew.stop()
    joined[0].close()


def test_the_key_of_a_group_is_never_sent(monkeypatch):
    sent = []
    monkeypatch.setattr(
        Connection, "_send", lambda self, data: sent.append(bytes(data)) or os.write(self._handle, data)
    )
    keys = []

    def start(invitations):
        keys.append(invitations[0].key)
        threads.append(threading.Thread(target=lambda: join_leader(invitations[0]).close()))
        threads[0].start()

    threads: list[threading.Thread] = []
    Crew.start(2, start).stop()
    threads[0].join()
    assert sent and not any(keys[0] in data for data in sent)
