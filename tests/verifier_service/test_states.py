"""State-space and hybrid targets: the library's logits, and bits that do not depend on how a text was computed."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest, EngineFailed, PeerLost
from dendro.state import MemoryStates, NoStates
from dendro.tree import DraftTree
from dendro.wire import MAX_STEP_SIZES
from transformers.models.bamba.modeling_bamba import BambaAttention
from tree_kernels.products import library_digest
from tree_kernels.tree_attention import PAGE

from tests.support.cases import few_of
from tests.support.engines import engine_of
from tests.support.exactness import bitwise_or_skip
from tests.support.made_once import made_once
from tests.support.routers import LAWS, RoundByRound, alone, arrive_at_random, guessing, watch_logits
from tests.support.tiny_hybrids import FAMILIES, VOCABULARY, make_checkpoint, oracle, paths_below, tree_below
from verifier_service.memory import PageTable, TextMemory
from verifier_service.recurrent import Arrangement, Extent, StatePool, last_writers

MIXED = ("mamba", "mamba2", "bamba", "mamba_in_llama")
"""One of each kind: Mamba-1, Mamba-2, with attention, and with heads that share x and B."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return made_once(tmp_path_factory, make_checkpoint)


def broken(*_):
    """Replaces a runner's method."""
    raise RuntimeError("broken by a test")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_trees_have_the_librarys_logits(models, family):
    folder, model = models(family)
    engine = engine_of(folder)
    rng = np.random.default_rng(0)
    for length in (1, 2, 16, 17, 60, 190):
        ids = rng.integers(0, VOCABULARY, length).tolist()
        found = engine.logits_of(ids, tree_below(ids[-1]))
        truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
        assert (found - truth).abs().max() < 1e-4, length


@pytest.mark.parametrize(("family", "attends"), [("mamba", False), ("mamba2", False), ("bamba", True)])
async def test_hello_states_whether_any_layer_attends(models, family, attends):
    assert (await engine_of(models(family)[0]).hello()).attends is attends


async def test_the_fingerprint_of_a_target_with_mixers_tells_the_librarys_arithmetic(models, monkeypatch):
    """Its scans and folds are the library's products, so its states go on only where those have the same bits."""
    folder = models("mamba2")[0]
    here, again = [(await engine_of(folder).hello()).fingerprint for _ in range(2)]
    assert here == again and here.endswith(f"-{library_digest()}")
    monkeypatch.setattr("verifier_service.models.library_digest", lambda: "elsewhere")
    assert (await engine_of(folder).hello()).fingerprint != here


async def test_hello_has_the_sizes_that_steps_are_padded_to(models):
    engine = engine_of(models("mamba2")[0])
    sizes = (await engine.hello()).step_sizes
    assert sizes == engine.runner.buckets and len(sizes) <= MAX_STEP_SIZES


async def test_hello_has_times_of_steps_that_do_not_fall_with_more_rows(models):
    engine = engine_of(models("mamba2")[0])
    rows, times = zip(*(await engine.hello()).timed_steps, strict=True)
    assert rows[0] == engine.runner.buckets[0] and set(rows) <= set(engine.runner.buckets) and len(rows) > 2
    assert list(times) == sorted(times) and times[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_rows_are_independent(models, family, dtype):
    bitwise_or_skip(engine_of(models(family)[0], dtype))


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_answers_are_those_of_the_full_forward(models, family):
    folder, model = models(family)
    engine = engine_of(folder)
    await engine.start()
    try:
        rng = np.random.default_rng(1)
        prompt = rng.integers(0, VOCABULARY, 21).tolist()
        truth = list(prompt)
        for _ in range(24):
            truth.append(int(oracle(model, truth).argmax()))
        found = await RoundByRound(engine, prompt, count=24).finish(guessing(rng, truth[21:], VOCABULARY))
        assert found == truth[21:]
    finally:
        await engine.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", few_of(MIXED, "bamba"))
async def test_random_arrivals_and_departures_change_no_token(models, family, dtype):
    """Pages for about four of the texts: they wait, are preempted and computed again."""
    rng = np.random.default_rng(2)
    engine = engine_of(models(family)[0], dtype, pool_tokens=7 * PAGE)
    await engine.start()
    try:
        # They end before the end of a page, so that all of them soon need another.
        lengths = [PAGE * int(rng.integers(1, 3)) - int(rng.integers(9, 30)) for _ in range(12)]
        prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
        laws = [LAWS[int(rng.integers(0, len(LAWS)))] for _ in prompts]
        await arrive_at_random(engine, prompts, laws, 40, rng, VOCABULARY, leaving=True)
        stats = engine.stats()
        assert stats["preempted"] > 0
        assert stats["pages_held"] == stats["sessions"] == 0
        assert engine.scheduler.memory.places.free == 8
    finally:
        await engine.stop()


@pytest.mark.parametrize("family", few_of(MIXED, "mamba2"))
async def test_a_thousand_random_rounds_leave_the_state_and_the_logits_of_straight_decoding(models, family):
    """Rounds that accept no guess, some and all; rounds without a tree; dropped verdicts. The memory after them and the
    logits of every visited row are bitwise those of decoding one token after another."""
    rounds = 1000 if family == "mamba2" else 250
    count = 3 * rounds
    rng = np.random.default_rng(3)
    engine = engine_of(models(family)[0], max_length=count + 64, max_sessions=2)
    seen = watch_logits(engine)
    await engine.start()
    try:
        prompt = rng.integers(0, VOCABULARY, 20).tolist()
        straight = RoundByRound(engine, prompt, LAWS[1], count)
        await straight.open()
        while len(straight.text) < straight.end - 1:
            await straight.round()
        router = RoundByRound(engine, prompt, LAWS[1], count)
        await router.open()
        trees = chains(rng, straight.answer)
        accepted, dropped = set(), 0
        for _ in range(rounds):
            before = len(router.text)
            verdict = await router.round(trees(router) if rng.random() < 0.9 else None)
            accepted.add(len(verdict.path) - 1)
            if rng.random() < 0.1:
                router.back_to(before)
                dropped += 1
        assert accepted == set(range(9)) and dropped > 10
        while len(router.text) < straight.end - 1:
            await router.round(trees(router))
        assert router.answer == straight.answer
        first, second = engine.scheduler.sessions.values()
        assert len(seen[first.number]) >= count - 1
        for position, logits in seen[first.number].items():
            assert torch.equal(seen[second.number][position], logits), position
        same_memory(engine, first.memory, second.memory)
    finally:
        await engine.stop()


def chains(rng, truth):
    """Trees of up to the greatest depth, right for a random number of levels, with siblings."""

    def tree(router):
        tokens, parents, done = [router.text.ids[-1]], [-1], len(router.answer)
        # One token comes after a path, so no path may reach the last token of the truth, even by chance.
        depth, last = min(int(rng.integers(0, 9)), max(len(truth) - done - 1, 0)), 0
        right = int(rng.integers(0, depth + 1))
        for step in range(depth):
            wanted = truth[done + step] if step < right and done + step < len(truth) else 0
            siblings = dict.fromkeys([*rng.integers(0, VOCABULARY, int(rng.integers(0, 3))).tolist(), wanted])
            tokens += siblings
            parents += [last] * len(siblings)
            last = len(tokens) - 1
        return DraftTree.of(tokens, parents)

    return tree


def same_memory(engine, first, second):
    """Both texts have consumed the same tokens; what both places still hold is bitwise the same."""
    assert first.consumed == second.consumed
    one, other = first.place, second.place
    length = len(first.consumed)
    positions = np.arange(length - 2 * one.extent.block, length)
    blocks = range(max(one.lowest, other.lowest), min(one.folded, other.folded) + 1)
    assert len(blocks) >= 2
    for layer in engine.runner.target.run.recurrent.layers:
        for store in (layer.raw, *layer.inputs):
            assert torch.equal(store[one.token_slots(positions)], store[other.token_slots(positions)])
        for block in blocks:
            assert torch.equal(layer.states[one.state_slot(block)], layer.states[other.state_slot(block)]), block


@pytest.mark.parametrize("family", few_of(MIXED, "mamba2"))
async def test_a_text_cut_to_before_its_ring_is_computed_again(models, family):
    engine = engine_of(models(family)[0])
    await engine.start()
    try:
        truth = await RoundByRound(engine, range(30), LAWS[1], 200).finish()
        router = RoundByRound(engine, range(30), LAWS[1], 200)
        await router.open()
        while len(router.text) < 180:
            await router.round(DraftTree.of([router.text.ids[-1], 1, 2], [-1, 0, 0]))
        router.back_to(60)
        assert await router.go_on() == truth
    finally:
        await engine.stop()


async def test_a_prompt_longer_than_its_ring_keeps_the_inputs_that_later_rows_need(models):
    """A chunk of 128 goes round a ring of 48 more than twice."""
    engine = engine_of(models("mamba2")[0], max_depth=4)
    assert engine.scheduler.capacity.recurrent.extent.ring == 48
    await engine.start()
    try:
        rng = np.random.default_rng(4)
        prompt = rng.integers(0, VOCABULARY, 400).tolist()
        router = RoundByRound(engine, prompt, count=1)
        await router.open()
        place = next(iter(engine.scheduler.sessions.values())).memory.place
        assert place.written == 399 and place.folded == 398 // 16 - 1
        await router.close()
    finally:
        await engine.stop()


def test_a_place_can_be_cut_by_its_slack_at_every_length():
    """The inputs that rows after a cut take are in the ring, and their checkpoint is not overwritten."""
    for block, depth in ((16, 16), (16, 3), (32, 20)):
        extent = Extent.of(block, depth + 1, depth)
        places = StatePool(1, extent)
        place = places.allocate()
        for tokens in range(1, 300):
            deepest = tokens - 1 + depth
            place.fold_to(max(deepest // block - 1, 0))
            place.append(tokens)
            for cut in range(depth + 2):
                length = max(tokens - cut, 0)
                assert place.can_cut(length), (block, depth, tokens, cut)
        assert not place.can_cut(tokens - 3 * block - depth)


def test_arrangements_give_every_place_slots_of_its_own():
    arranged = Arrangement.of(places=3, block=16, depth=8, step_rows=128)
    places = StatePool(arranged.places, arranged.extent)
    owned = [places.allocate() for _ in range(3)] + [arranged.own_place()]
    tokens = [set(place.token_slots(np.arange(4096)).tolist()) for place in owned]
    states = [{place.state_slot(block) for block in range(1, 500)} for place in owned]
    for slots, end in ((tokens, arranged.scratch), (states, arranged.states)):
        assert sorted(slot for each in slots for slot in each) == list(range(1, end))
    places.release(owned[1])
    assert places.allocate().first_token == owned[1].first_token


def test_of_several_rows_for_one_slot_the_last_is_kept():
    source, target = last_writers(np.arange(10, 16), np.array([3, 4, 5, 3, 4, 6]))
    assert dict(zip(target.tolist(), source.tolist(), strict=True)) == {3: 13, 4: 14, 5: 12, 6: 15}


def changed(folder, to, **changes):
    """A checkpoint with another configuration."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_a_hybrid_whose_rotary_embeddings_depend_on_the_batch_is_refused(models, tmp_path):
    folder = changed(models("bamba")[0], tmp_path / "c", rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(BadRequest, match="rotary embeddings .*type dynamic"):
        engine_of(folder)


def test_a_hybrid_with_a_layer_that_attends_past_our_seats_is_refused(models, monkeypatch):
    """Its keys would not be in our pages."""
    monkeypatch.setattr(BambaAttention, "forward", lambda self, hidden_states, *_, **ignored: (hidden_states, None))
    with pytest.raises(BadRequest, match="0 layers call the attention interface, not 1"):
        engine_of(models("bamba")[0])


def test_states_that_do_not_fit_their_share_of_the_memory_are_refused_with_the_numbers(models, monkeypatch):
    folder = models("mamba2")[0]
    monkeypatch.setattr("verifier_service.engine.free_bytes", lambda device: 1_000_000)
    with pytest.raises(BadRequest, match="memory_fraction: the states of max_sessions = 8 texts take 1 MB, .* 0.5 of"):
        engine_of(folder, memory_fraction=0.5)


def test_states_leave_the_rest_of_their_share_to_keys(models, monkeypatch):
    folder = models("bamba")[0]
    free = 64_000_000
    monkeypatch.setattr("verifier_service.engine.free_bytes", lambda device: free)
    engine = engine_of(folder, memory_fraction=0.5)
    target, arranged = engine.runner.target, engine.runner.arrangement
    states = target.recurrent_bytes(arranged.tokens, arranged.states)
    assert states > 500_000
    assert engine.stats()["pages"] == (free // 2 - states) // (target.token_bytes * PAGE)


async def test_a_memory_that_cannot_be_copied_is_not_saved_and_the_engine_goes_on(models, monkeypatch):
    store = MemoryStates()
    engine = engine_of(models("mamba2")[0], states=store)

    monkeypatch.setattr(engine.runner, "save", broken)
    await engine.start()
    try:
        router = RoundByRound(engine, range(40), LAWS[1], 8)
        await router.open()
        assert (await router.close()).saved == 0
        truth = await RoundByRound(engine, range(40), LAWS[1], 8).finish()
        assert len(truth) == 8 and not store.blobs and engine.stats()["sessions"] == 0
    finally:
        await engine.stop()


async def test_closes_pending_when_the_engine_stops_fail_with_peer_lost(models, monkeypatch):
    engine = engine_of(models("mamba2")[0], states=MemoryStates())
    began, go_on = threading.Event(), threading.Event()

    def slow(place, length):
        began.set()
        go_on.wait(10)
        return {}

    monkeypatch.setattr(engine.runner, "save", slow)
    await engine.start()
    routers = [RoundByRound(engine, range(start, start + 40), LAWS[1], 8) for start in (0, 1)]
    for router in routers:
        await router.open()
    closing = [asyncio.ensure_future(router.close()) for router in routers]
    await asyncio.to_thread(began.wait, 10)
    ending = asyncio.ensure_future(engine.stop())
    for each in closing:  # while the memory of one of them is being copied
        with pytest.raises(PeerLost):
            await asyncio.wait_for(each, 5)
    go_on.set()
    await ending


def test_a_state_space_model_of_an_unsupported_family_is_refused_as_such(models, tmp_path):
    folder = changed(models("mamba2")[0], tmp_path / "c", model_type="mamba9")
    with pytest.raises(BadRequest, match="state-space mixer of a kind that is not supported"):
        engine_of(folder)


# Saved states


async def two_turns(first, second, family_law=LAWS[1], marks=()):
    """A turn at one engine and the next at another; returns the second opening's answer and both turns' tokens."""
    one = RoundByRound(first, range(3, 40), family_law, 30)
    begin = await one.finish()
    other = RoundByRound(second, [*one.text.ids, 7, 8, 9], family_law, 30)
    other.parameters = replace(other.parameters, marks=(len(one.text.ids), *marks))
    opened = await other.open()
    return opened, begin, await other.go_on()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
async def test_a_session_goes_on_at_another_replica_from_its_saved_state(models, family, dtype):
    store = MemoryStates()
    folder = models(family)[0]
    engines = [engine_of(folder, dtype, states=states) for states in (store, store, NoStates())]
    for engine in engines:
        await engine.start()
    try:
        opened, begin, end = await two_turns(engines[0], engines[1])
        assert opened.restored == 37 + 30 - 1, "all but the last token, which neither has consumed"
        assert opened.processed == 3
        assert (await two_turns(engines[2], engines[2]))[1:] == (begin, end)
        assert engines[1].stats()["states_restored"] == 1
        assert engines[0].stats()["states_saved"] == 1
        assert all(engine.scheduler.memory.places.free == 8 for engine in engines)
        (size,) = {len(blob) for name, blob in store.blobs.items() if name == min(store.blobs)}
        assert size < 200_000
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("length", few_of([1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64], 15, 16, 17))
async def test_a_text_of_any_length_is_restored_bit_for_bit(models, length):
    """Also where its last block has just become full, and the next checkpoint is not computed yet."""
    store = MemoryStates()
    folder = models("mamba2")[0]
    engines = [engine_of(folder, states=states) for states in (store, store, NoStates())]
    for engine in engines:
        await engine.start()
    try:
        prompt = [(7 * place) % VOCABULARY for place in range(length + 1)]
        one = RoundByRound(engines[0], prompt, LAWS[1], 60)
        await one.open()
        assert (await one.close()).saved == length
        other = RoundByRound(engines[1], prompt, LAWS[1], 60)
        assert (await other.open()).restored == length
        truth = await RoundByRound(engines[2], prompt, LAWS[1], 60).finish()
        assert await other.go_on(chains(np.random.default_rng(length), truth)) == truth
    finally:
        for engine in engines:
            await engine.stop()


ADDED = (1, 15, 16, 17, 64, 200)
"""Tokens that a turn adds: fewer than a block of inputs, a block, one token more, and more than a step takes."""


@pytest.mark.parametrize(
    ("family", "dtype", "turns"),
    [
        ("mamba2", torch.bfloat16, 2),
        pytest.param("mamba2", torch.float32, 3, marks=pytest.mark.long),
        pytest.param("mamba", torch.float32, 3, marks=pytest.mark.long),
    ],
    ids=["mamba2-bf16", "mamba2-fp32", "mamba-fp32"],
)
async def test_a_session_goes_on_for_several_turns_of_any_length_beside_other_texts(models, family, dtype, turns):
    """Each turn goes on from the saved state. Its answer, and that of another text beside it, are those of an engine
    that saves no states."""
    folder = models(family)[0]
    keeps, plain = (engine_of(folder, dtype, states=states, max_length=768) for states in (MemoryStates(), NoStates()))

    async def turn(engine, ids, added, number):
        router = RoundByRound(engine, ids, LAWS[1], 4)
        router.parameters = replace(router.parameters, marks=(len(ids) - added,))
        other = RoundByRound(engine, [(5 * place + number) % VOCABULARY for place in range(40)], LAWS[2], 5)
        await other.open()
        opened, _ = await asyncio.gather(router.open(), other.round())
        return opened, router.text, await asyncio.gather(router.go_on(), other.go_on())

    await keeps.start()
    await plain.start()
    try:
        for added in ADDED:
            ids = [3, 1, 4, 1, 5, added % VOCABULARY]
            for number in range(turns):
                opened, text, found = await turn(keeps, ids, added, number)
                assert opened.restored == (len(ids) - added - 1 if number else 0), (added, number)
                _, _, truth = await turn(plain, ids, added, number)
                assert found == truth, (added, number)
                ids = [*text.ids, *((3 * place + number) % VOCABULARY for place in range(added))]
        assert keeps.stats()["states_restored"] == (turns - 1) * len(ADDED)
    finally:
        await keeps.stop()
        await plain.stop()


async def test_a_text_whose_saved_memory_cannot_be_restored_is_computed_and_no_other_text_is_affected(
    models, monkeypatch
):
    store = MemoryStates()
    engine = engine_of(models("mamba2")[0], states=store)

    await engine.start()
    try:
        first = RoundByRound(engine, range(40), LAWS[1], 20)
        await first.finish()
        ids = [*first.text.ids, 7, 8, 9]
        monkeypatch.setattr(engine.runner, "restore", broken)
        other = RoundByRound(engine, range(50, 80), LAWS[1], 20)
        await other.open()
        again = RoundByRound(engine, ids, LAWS[1], 20)
        again.parameters = replace(again.parameters, marks=(len(first.text.ids),))
        opened, _ = await asyncio.gather(again.open(), other.round())
        assert (opened.restored, opened.processed) == (0, len(ids) - 1)
        found = await asyncio.gather(again.go_on(), other.go_on())
        store.blobs.clear()
        assert found == await alone(engine, [ids, range(50, 80)], [LAWS[1]] * 2, 20)
        assert engine.scheduler.memory.places.free == 8
    finally:
        await engine.stop()


async def test_a_text_to_be_restored_when_all_texts_end_ends_no_later_text(models, monkeypatch):
    engine = engine_of(models("mamba2")[0], states=MemoryStates())
    await engine.start()
    try:
        first = RoundByRound(engine, range(40), LAWS[1], 20)
        await first.finish()
        plan = engine.scheduler.next

        def failing():
            planned = plan()
            if any(each.restored for each in engine.scheduler.sessions.values()):
                monkeypatch.setattr(engine.scheduler, "next", plan)
                raise RuntimeError("planted")
            return planned

        monkeypatch.setattr(engine.scheduler, "next", failing)
        again = RoundByRound(engine, first.text.ids, LAWS[1], 20)
        again.parameters = replace(again.parameters, marks=(len(first.text.ids),))
        with pytest.raises(EngineFailed, match="planted"):
            await again.open()
        expected = await alone(engine, [range(50, 80)], [LAWS[1]], 20)
        assert [await RoundByRound(engine, range(50, 80), LAWS[1], 20).finish()] == expected
    finally:
        await engine.stop()


async def test_a_store_that_raises_while_a_state_is_saved_ends_no_text(models):
    class Raising(MemoryStates):
        async def save(self, name, blob):
            raise RuntimeError("no such store")

    engine = engine_of(models("mamba2")[0], states=Raising())
    await engine.start()
    try:
        router = RoundByRound(engine, range(40), LAWS[2], 20)
        await router.open()
        for _ in range(5):
            await router.round()
        assert (await router.close()).saved == 0
        assert len(await RoundByRound(engine, range(40), LAWS[2], 20).finish()) == 20
    finally:
        await engine.stop()


def test_a_saved_memory_newer_than_the_next_row_needs_is_not_restored():
    """The next row would start from an older checkpoint than the saved one: that slot holds another text's."""
    extent = Extent.of(16, 9, 8)
    for length, tokens, stands in ((33, 17, True), (33, 1, False), (33, 33, True), (15, 15, True), (40, 8, False)):
        memory = PageTable(8, places=StatePool(1, extent))
        assert memory.restore(TextMemory(b""), list(range(length)), tokens) is stands, (length, tokens)


async def test_a_damaged_state_is_a_miss(models):
    store = MemoryStates()
    folder = models("mamba2")[0]
    engine, plain = engine_of(folder, states=store), engine_of(folder)
    await engine.start()
    await plain.start()
    try:
        for damage in (lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), lambda blob: blob[: len(blob) // 2]):
            one = RoundByRound(engine, range(40), LAWS[1], 20)
            truth = await one.finish()
            store.blobs = {name: damage(blob) for name, blob in store.blobs.items()}
            opened, _, end = await two_turns(engine, engine)
            assert end == (await two_turns(plain, plain))[2]
        other = RoundByRound(engine, [*one.text.ids], LAWS[1], 20)
        assert (await other.open()).restored == 0 and truth
        assert engine.stats()["states_refused"] >= 1
        await other.close()
    finally:
        await engine.stop()
        await plain.stop()


async def test_a_text_that_is_preempted_after_it_was_restored_is_computed_again(models):
    store = MemoryStates()
    folder = models("mamba2")[0]
    engine = engine_of(folder, states=store, pool_tokens=3 * PAGE)
    await engine.start()
    try:
        prompts = [[place + 1] * 50 for place in range(3)]
        truths = [await RoundByRound(engine, prompt, LAWS[1], 60).finish() for prompt in prompts]
        store.blobs.clear()
        for prompt in prompts:
            router = RoundByRound(engine, prompt, LAWS[1], 60)
            await router.open()
            await router.close()
        found = await asyncio.gather(*(RoundByRound(engine, prompt, LAWS[1], 60).finish() for prompt in prompts))
        assert found == truths
        assert engine.stats()["preempted"] > 0 and engine.stats()["states_restored"] >= 3
    finally:
        await engine.stop()


async def test_a_hybrid_saves_no_state(models):
    store = MemoryStates()
    engine = engine_of(models("bamba")[0], states=store)
    await engine.start()
    try:
        await RoundByRound(engine, range(40), count=4).finish()
        assert not store.blobs
    finally:
        await engine.stop()
