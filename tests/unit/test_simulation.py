"""The simulated step against steps whose seconds are known by hand, and what must hold of any."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.lab.simulation.recorded import Group, Phase, RecordedRun, ResourceCounts, Rollout, Step, Turn
from draco_ray.lab.simulation.scaling import GPUS, find_bottleneck, scale_to_gpus, simulate_step, throughput
from draco_ray.lab.simulation.step import WAITS, Engine, SimulatedStep, Speeds, now, run_on_simulated_clock, simulate

JUDGE = {"stage1": 1.0, "stage2": 2.0, "union": 3.0, "score": 4.0, "credit": 5.0}
SPEEDS = Speeds(per_sampled=1.0, per_learned=0.01, update=1.0, head=0.5, tail=2.0)
"""A sampled token takes a second, so that a turn's tokens are its seconds."""


def group(*generating: float, tokens: int = 100, judge: dict[str, float] | None = None, failed: bool = False) -> Group:
    """A group whose rollouts generate for so long, in one turn each."""
    phases = {
        (name, number): Phase(seconds=took, tokens=1000, dollars=0.01)
        for name, took in (JUDGE if judge is None else judge).items()
        for number in ([None] if name in ("stage1", "union") else range(len(generating)))
    }
    rollouts = tuple(
        Rollout(number=number, turns=(Turn(generating=took, sampled=took),), ended=took, tokens=tokens)
        for number, took in enumerate(generating)
    )
    return Group(rollouts=rollouts, phases=phases, failed=failed)


def step(*groups: Group, speeds: Speeds = SPEEDS, **setting: object) -> SimulatedStep:
    size = max(len(each.rollouts) for each in groups)
    chosen = ResourceCounts(**{"slots": 100, "group_size": size, **setting})  # type: ignore[arg-type]
    return simulate([groups], speeds, chosen)[0]


def test_a_step_is_its_longest_chain() -> None:
    # 0.5 until it begins, the longer rollout, stage2, union, score, credit, 2 s of gradients, the update, the sync.
    played = step(group(10.0, 6.0))
    assert played.seconds == pytest.approx(0.5 + 10 + 2 + 3 + 4 + 5 + 2 + 1 + 2)
    assert played.path == pytest.approx(
        {
            "between steps": 0.5,
            "generating": 10,
            "stage2": 2,
            "union": 3,
            "score": 4,
            "credit": 5,
            "learning": 3,
            "sync and checkpoint": 2,
        }
    )


def test_what_is_asked_of_the_prompt_alone_is_hidden_behind_the_rollouts() -> None:
    assert step(group(10.0, 6.0, judge={**JUDGE, "stage1": 9.0})).seconds == step(group(10.0, 6.0)).seconds
    late = step(group(10.0, 6.0, judge={**JUDGE, "stage1": 30.0}))
    assert late.seconds == pytest.approx(step(group(10.0, 6.0)).seconds + 20)
    assert late.path["stage1"] == pytest.approx(30)


def test_rollouts_wait_for_slots_in_the_order_of_their_groups() -> None:
    # Two slots, four rollouts of 10 s: the first group has them first, and the learner is done with it meanwhile.
    played = step(group(10.0, 10.0), group(10.0, 10.0), slots=2)
    assert played.seconds == pytest.approx(0.5 + 20 + 14 + 2 + 1 + 2)
    assert played.path[WAITS["slots"]] == pytest.approx(10)
    assert find_bottleneck(played) == "slots"


def test_sequences_of_an_engine_share_it() -> None:
    # With a slowdown of 1 a sequence two take twice as long: 4 and 10 s alone are 8 s together, then 6 s alone.
    speeds = replace(SPEEDS, slowdown=1.0)
    shared, alone = step(group(4.0, 10.0), speeds=speeds), step(group(4.0, 10.0), speeds=speeds, engines=2)
    assert shared.seconds - alone.seconds == pytest.approx(4)
    assert shared.path[WAITS["engines"]] == pytest.approx(4)
    assert WAITS["engines"] not in alone.path


def test_an_engine_takes_no_more_sequences_than_it_may() -> None:
    free = step(group(4.0, 10.0, 3.0)).seconds
    assert step(group(4.0, 10.0, 3.0), sequences=2).seconds == pytest.approx(free)
    assert step(group(4.0, 10.0, 3.0), sequences=1).seconds == pytest.approx(free + 7)


def test_calls_wait_for_a_worker_the_later_phases_first() -> None:
    # One call at a time: stage1 1, three stage2 one after the other, then three scores and three credits.
    played = step(group(10.0, 10.0, 10.0), judge_workers=1, calls_per_worker=1)
    assert played.seconds == pytest.approx(0.5 + 10 + 3 * 2 + 3 + 3 * 4 + 3 * 5 + 3 + 1 + 2)
    assert find_bottleneck(played) == "judge workers"


def test_the_union_has_a_worker_of_its_own() -> None:
    alone = step(group(1.0, 1.0), judge_workers=1, calls_per_worker=1)
    assert alone.path.get("union") == pytest.approx(3)


def test_requests_a_minute_are_spread() -> None:
    # 60 a minute: five may leave at once, then one a second. Of 12 scores the last leaves 12 - 5 seconds later.
    scores = group(*[10.0] * 12, judge={"score": 4.0})
    played, free = step(scores, requests_per_minute=60.0), step(scores)
    assert played.seconds - free.seconds == pytest.approx(7, abs=1)
    assert find_bottleneck(played) == "judge limits"


def test_what_exceeds_the_minutes_tokens_waits_for_the_next_minute() -> None:
    scores = group(*[10.0] * 3, judge={"score": 4.0})
    played, free = step(scores, tokens_per_minute=2500.0), step(scores)
    assert played.seconds - free.seconds == pytest.approx(60, abs=1)


def test_the_learner_does_one_thing_at_a_time_and_later_minibatches_wait() -> None:
    speeds = replace(SPEEDS, per_learned=0.1, remember_share=0.25, update=1.0)
    # Each group's gradients take 20 s. Two updates: 20 and 5 of old log-probs, 1, 20, 1.
    two = step(group(10.0, 10.0), group(10.0, 10.0), speeds=speeds, minibatch=1)
    assert two.seconds == pytest.approx(0.5 + 10 + 14 + 20 + 5 + 1 + 20 + 1 + 2)
    one = step(group(10.0, 10.0), group(10.0, 10.0), speeds=speeds)
    assert one.seconds == pytest.approx(0.5 + 10 + 14 + 20 + 20 + 1 + 2)
    assert one.path[WAITS["learner"]] == pytest.approx(20)


def test_a_shared_gpu_learns_when_all_is_judged() -> None:
    groups = group(1.0, 1.0), group(30.0, 30.0)
    turns = step(*groups, colocate=True)
    assert turns.seconds == pytest.approx(step(*groups).seconds + 2)
    assert turns.path["generating"] == pytest.approx(30)


def test_a_step_that_runs_ahead_hides_its_rollouts() -> None:
    work = [[group(10.0, 10.0)]] * 4
    setting = ResourceCounts(slots=100, group_size=2)
    behind = [each.seconds for each in simulate(work, SPEEDS, setting)]
    ahead = [each.seconds for each in simulate(work, SPEEDS, replace(setting, staleness=1))]
    assert behind == pytest.approx([29.5] * 4)
    # The second begins as ever; the third's rollouts and judging run beside it, and are over with it.
    assert ahead[:2] == pytest.approx(behind[:2])
    assert ahead[2] == pytest.approx(3 + 2)
    assert sum(simulate(work, SPEEDS, replace(setting, staleness=1))[2].path.values()) == pytest.approx(5)


def test_of_steps_that_run_ahead_a_usual_one_counts() -> None:
    # One slot: two rollouts of 10 s a step are the pace, whatever else is hidden behind them.
    setting = ResourceCounts(slots=1, group_size=2, staleness=1)
    assert simulate_step([group(10.0, 10.0)], SPEEDS, setting).seconds == pytest.approx(20, abs=1)
    alone = replace(setting, staleness=0)
    assert simulate_step([group(10.0, 10.0)], SPEEDS, alone) == simulate([[group(10.0, 10.0)]], SPEEDS, alone)[0]


def recorded(setting: ResourceCounts, *groups: Group, gpus: float = 1.0) -> RecordedRun:
    """A run of one such step."""
    step = Step(number=2, began=0.0, seconds=30.0, groups=groups, learning=((20.0, 25.0),), updates=1)
    return RecordedRun(
        name="run", setting=setting, steps=(step,), remember_share=0.25, gpus_per_engine=gpus, learner_gpus=gpus
    )


def test_throughput_with_staleness_is_that_of_the_slower_side() -> None:
    # A step waits 10 s for its rollouts and 4 s for the learner (3 s and the sync's tail); side by side 10 s are left.
    groups, speeds = [group(10.0, 10.0, judge={})], Speeds(per_sampled=1.0, per_learned=0.01, update=1.0, tail=1.0)
    run = recorded(ResourceCounts(slots=2, group_size=2), *groups)
    hourly = [throughput(run, replace(run.setting, staleness=n), speeds, 2, 0) for n in (0, 1)]
    assert hourly == pytest.approx([3600 * 2 / 14, 3600 * 2 / 10])


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("of_the_run", [0.0, 2.0])
def test_gpus_are_split_as_in_the_run_and_all_used(gpus: int, of_the_run: float) -> None:
    run = recorded(ResourceCounts(slots=12, engines=3, requests_per_minute=60.0), group(1.0), gpus=of_the_run)
    larger, each = scale_to_gpus(run, run.setting, gpus), of_the_run or 1.0
    assert larger.engines * each + larger.learners * each == gpus
    assert larger.learners >= 1
    assert larger.engines == pytest.approx(0.75 * gpus / each, abs=0.5)
    assert larger.requests_per_minute == pytest.approx(20.0 * larger.engines)
    assert larger.slots == 4 * larger.engines


def test_a_group_that_failed_fails_again_and_the_learner_goes_on() -> None:
    whole = group(10.0, 10.0)
    broken = group(10.0, 10.0, judge={"stage1": 1.0, "stage2": 2.0, "union": 3.0}, failed=True)
    assert step(whole, broken) == step(whole)
    assert step(broken, broken).path["learning"] == pytest.approx(1)


def test_a_rollout_that_was_lost_leaves_its_group_to_the_others() -> None:
    assert step(group(10.0, 10.0), group_size=3).path["learning"] == pytest.approx(2 + 1)


def test_without_a_rubric_nothing_is_judged() -> None:
    assert step(group(10.0, 6.0, judge={})).seconds == pytest.approx(0.5 + 10 + 2 + 1 + 2)


def test_a_reply_from_the_cache_asks_for_no_leave() -> None:
    cached: dict[tuple[str, int | None], Phase] = {
        ("score", number): Phase(seconds=0.5, requests=0) for number in range(20)
    }
    played = step(replace(group(*[1.0] * 20), phases=cached), requests_per_minute=1.0)
    assert played.seconds == pytest.approx(0.5 + 1 + 0.5 + 20 + 1 + 2)


def test_a_queue_of_one_server_is_as_long_as_theory_says() -> None:
    # M/D/1: Poisson arrivals at utilisation 0.5 wait rho / (2 (1 - rho)) service times on average, a half.
    async def queue() -> float:
        random = np.random.default_rng(1)
        engine, waits = Engine(0.0, 1), []

        async def arrive() -> None:
            begun = now()
            await engine.generate(1.0)
            waits.append(now() - begun - 1.0)

        tasks = []
        for _ in range(20_000):
            await asyncio.sleep(random.exponential(2.0))
            tasks.append(asyncio.create_task(arrive()))
        await asyncio.gather(*tasks)
        return float(np.mean(waits))

    assert run_on_simulated_clock(queue()) == pytest.approx(0.5, rel=0.05)


def test_nothing_to_wait_for_is_an_error_and_no_hang() -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_on_simulated_clock(never())


durations = st.floats(0.1, 50.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Group], Speeds, ResourceCounts]:
    size = draw(st.integers(2, 4))
    judge = {name: draw(durations) for name in JUDGE}
    groups = [
        group(*[draw(durations) for _ in range(size)], tokens=draw(st.integers(0, 500)), judge=judge)
        for _ in range(draw(st.integers(1, 5)))
    ]
    speeds = replace(
        SPEEDS,
        slowdown=draw(st.floats(0.0, 2.0)),
        update=draw(st.floats(0.0, 3.0)),
        handover=dict.fromkeys(("rollout", "stage2", "score", "learning"), draw(st.floats(0.0, 1.0))),
        head=draw(st.floats(0.0, 2.0)),
        tail=draw(st.floats(0.0, 2.0)),
    )
    setting = ResourceCounts(
        slots=draw(st.integers(1, 20)),
        engines=draw(st.integers(1, 3)),
        sequences=draw(st.integers(1, 8)),
        judge_workers=draw(st.integers(1, 2)),
        calls_per_worker=draw(st.integers(1, 4)),
        requests_per_minute=draw(st.none() | st.floats(5.0, 200.0)),
        tokens_per_minute=draw(st.none() | st.floats(2000.0, 100_000.0)),
        minibatch=draw(st.integers(0, 3)),
        staleness=draw(st.integers(0, 2)),
        colocate=draw(st.booleans()),
        group_size=size,
    )
    return groups, speeds, setting


def least_seconds(groups: Sequence[Group], speeds: Speeds, setting: ResourceCounts) -> float:
    """What no step can be shorter than: its longest group, and all that the learner does after the last rollout."""
    longest = max(max(turn.sampled for each in group.rollouts for turn in each.turns) for group in groups)
    judged = sum(seconds for name, seconds in judge_of(groups[0]).items() if name != "stage1")
    return speeds.head + longest + judged + speeds.update + speeds.tail


def judge_of(group: Group) -> dict[str, float]:
    return {name: phase.seconds for (name, _), phase in group.phases.items()}


@settings(max_examples=60, deadline=None)
@given(steps())
def test_the_longest_path_is_the_step_and_no_second_of_it_is_without_a_name(
    given: tuple[list[Group], Speeds, ResourceCounts],
) -> None:
    groups, speeds, setting = given
    for number, played in enumerate(simulate([groups] * 3, speeds, setting)):
        assert math.fsum(played.path.values()) == pytest.approx(played.seconds, abs=1e-5)
        assert played.path.get("between steps", 0.0) <= speeds.head + 1e-5
        if number == 0:
            assert played.seconds >= least_seconds(groups, speeds, setting) - 1e-6


@settings(max_examples=40, deadline=None)
@given(steps())
def test_more_engines_are_never_slower_where_nothing_else_is_short(
    given: tuple[list[Group], Speeds, ResourceCounts],
) -> None:
    groups, speeds, setting = given
    free = replace(
        setting,
        slots=1000,
        sequences=1000,
        judge_workers=100,
        calls_per_worker=32,
        requests_per_minute=None,
        tokens_per_minute=None,
        minibatch=0,
        staleness=0,
        colocate=True,
    )
    # As many as divide the rollouts evenly: otherwise one engine may have the two long ones.
    few = simulate([groups], speeds, replace(free, engines=1))[0]
    most = simulate([groups], speeds, replace(free, engines=sum(len(each.rollouts) for each in groups)))[0]
    assert most.seconds <= few.seconds + 1e-6
    assert WAITS["engines"] not in most.path
