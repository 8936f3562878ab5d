"""A hung step is told from a long prompt: each step is watched by itself."""

from dendro.health import StepWatch


def test_an_engine_is_well_while_each_of_its_steps_comes_back_however_many_there_are():
    now = [0.0]
    watch = StepWatch(10.0, clock=lambda: now[0])
    for _ in range(100):
        with watch.busy():
            now[0] += 9.0
            assert watch.fault() == ""
    now[0] += 1000.0
    assert watch.fault() == "", "it has nothing to do"


def test_an_engine_whose_step_does_not_come_back_says_for_how_long_and_is_well_again_when_it_does():
    now = [0.0]
    watch = StepWatch(10.0, clock=lambda: now[0])
    with watch.busy():
        now[0] += 11.0
        assert "has not come back for 11 s" in watch.fault()
    assert watch.fault() == ""
