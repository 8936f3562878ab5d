"""An engine hangs if one step takes too long; the total time of its steps does not matter."""

from dendro.health import StepWatch


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
