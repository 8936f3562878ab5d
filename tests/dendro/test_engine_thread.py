"""The thread that both engines run in, around steps and calls that a test scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from dendro.engine import EngineThread, StepWatch, Ticket
from dendro.errors import DendroError, EngineFailed, NotFound, PeerLost

from tests.support.faults import Panic


class PanicOfCall(Panic):
    pass


class ScriptedSteps:
    """A step answers the oldest waiting call. A call or step that gets an exception raises it."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.tickets: list[tuple[Ticket, object]] = []
        self.ends: list[DendroError] = []
        self.gone: list[object] = []
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.broken = ""
        self.thread = EngineThread(
            "toy", self.step, self.end, setup=lambda: None, broken=lambda: self.broken, longest_step_s=5.0, clock=clock
        )

    def step(self) -> float | None:
        if not self.tickets:
            return None
        self.began.set()
        self.go_on.wait(10)
        ticket, value = self.tickets.pop(0)
        if isinstance(value, ArithmeticError | Panic):
            raise value
        ticket.settle(value)
        return 0.0

    def end(self, reason: DendroError) -> None:
        self.ends.append(reason)
        for ticket, _ in self.tickets:
            ticket.settle(reason)
        self.tickets.clear()

    async def ask(self, value: object) -> object:
        def work(ticket: Ticket) -> None:
            if isinstance(value, LookupError | DendroError | PanicOfCall):
                raise value
            self.tickets.append((ticket, value))

        return await self.thread.ask(work, lambda ticket: self.gone.append(value))


async def test_calls_are_answered_in_order_those_made_before_the_start_too():
    steps, answers = ScriptedSteps(), []

    async def ask(value: int) -> None:
        answers.append(await steps.ask(value))

    calls = [asyncio.create_task(ask(value)) for value in range(5)]
    await asyncio.sleep(0)
    steps.thread.start()
    await asyncio.gather(*calls)
    await steps.thread.stop()
    assert answers == [0, 1, 2, 3, 4]


async def test_answers_of_one_step_wake_the_event_loop_once(monkeypatch):
    tickets: list[Ticket] = []
    answered, wakes = threading.Event(), []

    def step() -> float | None:
        if len(tickets) == 3:
            for ticket in tickets:
                ticket.settle("together")
            answered.set()
        return None

    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (wakes.append(args), wake(*args)))
    thread = EngineThread("toy", step, lambda reason: None, setup=lambda: None)
    calls = [asyncio.create_task(thread.ask(tickets.append)) for _ in range(3)]
    await asyncio.sleep(0)
    thread.start()
    assert answered.wait(10), "the event loop waits, too, and takes no answer before the others are ready"
    assert await asyncio.gather(*calls) == ["together"] * 3
    assert len(wakes) == 1
    await thread.stop()


async def test_a_call_that_raises_fails_alone_and_a_step_that_raises_ends_all_texts():
    steps = ScriptedSteps()
    steps.thread.start()
    with pytest.raises(NotFound):
        await steps.ask(NotFound("there is none"))
    with pytest.raises(EngineFailed, match="toy: KeyError"):
        await steps.ask(KeyError("no such key"))
    assert steps.ends == []
    with pytest.raises(EngineFailed, match="toy: too large"):
        await steps.ask(OverflowError("too large"))
    assert len(steps.ends) == 1 and await steps.ask("later") == "later"
    await steps.thread.stop()


async def test_a_panic_in_a_call_fails_it_alone_and_one_in_a_step_ends_the_texts_and_not_the_thread():
    steps = ScriptedSteps()
    steps.thread.start()
    with pytest.raises(EngineFailed, match="toy: PanicOfCall"):
        await steps.ask(PanicOfCall("in the call"))
    assert steps.ends == [] and await steps.ask("later") == "later"
    with pytest.raises(EngineFailed, match="toy: Panic"):
        await steps.ask(Panic("in the step"))
    assert len(steps.ends) == 1 and await steps.ask("later still") == "later still"
    assert not steps.thread.fault()
    await steps.thread.stop()


async def test_a_lost_engine_fails_its_calls_while_a_step_hangs_and_all_later_ones():
    steps = ScriptedSteps()
    steps.thread.start()
    steps.go_on.clear()
    call = asyncio.create_task(steps.ask(1))
    await asyncio.to_thread(steps.began.wait, 10)
    assert steps.thread.lose("a part is gone") and not steps.thread.lose("another part is gone")
    with pytest.raises(PeerLost, match="toy: a part is gone"):
        await call
    with pytest.raises(PeerLost, match="toy: a part is gone"):
        await steps.ask(2)
    assert await steps.thread.lost() == steps.thread.fault() == "a part is gone"
    steps.go_on.set()
    await steps.thread.stop()
    assert [str(reason) for reason in steps.ends] == ["toy: a part is gone"]


@pytest.mark.parametrize("error", [KeyError("in a call"), OverflowError("in a step")], ids=["call", "step"])
async def test_an_engine_that_is_broken_after_an_error_is_lost(error):
    steps = ScriptedSteps()
    steps.broken = "a part is gone"
    steps.thread.start()
    with pytest.raises(PeerLost, match="toy: a part is gone"):
        await steps.ask(error)
    assert await steps.thread.lost() == steps.thread.fault() == "a part is gone"
    await steps.thread.stop()


async def test_a_caller_that_leaves_is_known_to_the_thread():
    steps = ScriptedSteps()
    call = asyncio.create_task(steps.ask("left"))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    steps.thread.start()
    await steps.ask("stayed")
    assert call.cancelled() and steps.gone == ["left"]
    await steps.thread.stop()


async def test_a_step_hangs_by_the_given_clock():
    now = [0.0]
    steps = ScriptedSteps(lambda: now[0])
    steps.thread.start()
    steps.go_on.clear()
    call = asyncio.create_task(steps.ask(1))
    await asyncio.to_thread(steps.began.wait, 10)
    assert steps.thread.fault() == ""
    now[0] = 6.0
    assert "has not come back for 6 s" in steps.thread.fault()
    steps.go_on.set()
    assert await call == 1
    await steps.thread.stop()


async def test_an_engine_may_be_stopped_before_it_is_started_and_twice_but_not_started_twice():
    steps = ScriptedSteps()
    await steps.thread.stop()
    await steps.thread.stop()
    with pytest.raises(PeerLost, match="it was stopped"):
        await steps.ask(1)
    started = ScriptedSteps()
    started.thread.start()
    with pytest.raises(RuntimeError, match="started before"):
        started.thread.start()
    await started.thread.stop()


@pytest.mark.parametrize("started", [False, True])
async def test_work_for_checks_runs_where_the_model_runs_before_the_start_too(started):
    steps = ScriptedSteps()
    if started:
        steps.thread.start()
    assert steps.thread.run(lambda: threading.current_thread().name).startswith("toy")
    await steps.thread.stop()


async def test_a_step_that_waits_for_calls_is_repeated_after_that_time():
    """A scheduler that delays a step for a call that does not come runs it all the same."""
    steps, waits, done = ScriptedSteps(), iter((0.001, 0.001)), threading.Event()

    def step() -> float | None:
        wait_s = next(waits, None)
        if wait_s is None:
            done.set()
        return wait_s

    steps.thread._step = step
    steps.thread.start()
    steps.thread.post(lambda ticket: None)
    assert await asyncio.to_thread(done.wait, 10)
    await steps.thread.stop()


def test_many_short_steps_and_a_long_idle_time_are_no_hang():
    now = [0.0]
    watch = StepWatch(10.0, clock=lambda: now[0])
    for _ in range(100):
        with watch.busy():
            now[0] += 9.0
            assert watch.fault() == ""
    now[0] += 1000.0
    assert watch.fault() == "", "it is idle"


def test_a_step_that_takes_too_long_is_a_hang_until_it_ends():
    now = [0.0]
    watch = StepWatch(10.0, clock=lambda: now[0])
    with watch.busy():
        now[0] += 11.0
        assert "has not come back for 11 s" in watch.fault()
    assert watch.fault() == ""
