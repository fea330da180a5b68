"""Which tasks a step trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.pipeline import Group
from draco_ray.summaries import RewardSummary
from draco_ray.training.checks import task_order
from draco_ray.training.metrics import group_pass_rate, solved
from draco_ray.training.trainer import OrderRules, TaskOrder, TaskPart

NINETY = [f"task{index:02d}" for index in range(90)]
AS_EVER = OrderRules(per_step=16, seed=4, skip_solved=None, behind=0)


def resumed_with(now: Sequence[str], *earlier: tuple[Sequence[str], int, OrderRules], **rules: Any) -> TaskOrder:
    """Tasks and rules of now, after parts of other tasks up to a step, by other rules."""
    order, first, parts = TaskOrder(now, **rules), 1, []
    for tasks, last, by in earlier:
        parts.append(TaskPart(first, tuple(sorted(tasks)), by))
        first = last + 1
    order.parts = [*parts, replace(order.parts[0], first_step=first)]
    return order


def test_ninety_tasks_at_sixteen_a_step_are_five_steps_an_epoch() -> None:
    order = TaskOrder(NINETY, 16, seed=0)
    assert order.steps_per_epoch == 5
    assert 20 * order.steps_per_epoch == 100
    assert 15 * order.steps_per_epoch == 75


def test_no_task_comes_twice_in_an_epoch() -> None:
    order = TaskOrder(NINETY, 16, seed=1)
    for epoch in range(3):
        seen = [task for step in range(1, 6) for task in order.tasks(5 * epoch + step)]
        assert len(set(seen)) == 80


def test_the_order_depends_on_the_seed_and_the_step_alone() -> None:
    order, again, other = (TaskOrder(tasks, 16, seed=s) for tasks, s in ((NINETY, 1), (NINETY[::-1], 1), (NINETY, 2)))
    assert order.tasks(7) == again.tasks(7)
    assert order.tasks(7) != other.tasks(7)
    assert order.tasks(1) != order.tasks(6), "epochs are shuffled anew"


def test_too_few_tasks_for_a_step_is_an_error_of_the_configuration() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train.prompts_per_step is 16, .* 3 usable tasks; lower train.prompts_per_step, or add tasks$",
    ):
        TaskOrder(NINETY[:3], 16, seed=0)


def epochs_of(order: TaskOrder, steps: int) -> list[list[str]]:
    return [order.tasks(step) for step in range(1, steps + 1)]


def test_tasks_that_were_added_take_part_from_the_next_epoch_on() -> None:
    more = [*NINETY, *(f"added{index:02d}" for index in range(38))]
    plain = TaskOrder(NINETY, 16, seed=4)
    grown = resumed_with(more, (NINETY, 7, plain.rules), per_step=16, seed=4)
    # Steps 6 to 10 are one epoch; the run was resumed in the midst of it.
    assert epochs_of(grown, 10) == epochs_of(plain, 10)
    epoch = [task for step in range(11, 19) for task in grown.tasks(step)]
    assert sorted(epoch) == sorted(more)
    assert set(grown.tasks(19)) <= set(more)
    assert grown.last_step(2) == plain.last_step(2) == 10
    assert grown.last_step(4) == 10 + 8 + 8


def test_tasks_that_were_removed_are_left_out_at_once() -> None:
    fewer = NINETY[30:]
    shrunk = resumed_with(fewer, (NINETY, 7, AS_EVER), per_step=16, seed=4)
    assert epochs_of(shrunk, 7) == epochs_of(TaskOrder(NINETY, 16, seed=4), 7)
    later = [shrunk.tasks(step) for step in range(8, 30)]
    assert not set(NINETY[:30]) & {task for tasks in later for task in tasks}
    assert all(len(set(tasks)) == 16 for tasks in later)
    # What is left of the epoch, whole steps of it, then three steps of sixty tasks.
    assert shrunk.last_step(3) - shrunk.last_step(2) == 3


def test_parts_of_a_run_add_up() -> None:
    parts = [(NINETY[:40], 3, AS_EVER), (NINETY[:60], 9, AS_EVER)]
    order = resumed_with(NINETY, *parts, per_step=16, seed=4)
    assert epochs_of(order, 9) == epochs_of(resumed_with(NINETY[:60], parts[0], per_step=16, seed=4), 9)
    assert {task for tasks in epochs_of(order, 3) for task in tasks} <= set(NINETY[:40])
    assert {task for step in range(10, 30) for task in order.tasks(step)} == set(NINETY)


def visits(order: TaskOrder, steps: int, solved: Callable[[str], bool]) -> list[list[str]]:
    """The tasks of each step, where those that ``solved`` says are."""
    found = []
    for step in range(1, steps + 1):
        found.append(order.tasks(step))
        order.note(step, [task for task in found[-1] if solved(task)])
    return found


def test_where_nothing_is_solved_nothing_is_skipped() -> None:
    usual, skipping = TaskOrder(NINETY, 16, seed=3), TaskOrder(NINETY, 16, seed=3, skip_solved=1)
    assert visits(skipping, 17, lambda task: False) == [usual.tasks(step) for step in range(1, 18)]


def test_a_task_solved_n_times_running_rests_n_epochs_and_comes_again() -> None:
    order = TaskOrder(["a", "b", "c", "d"], 1, seed=0, skip_solved=2)
    found = [task for (task,) in visits(order, 40, lambda task: task == "a")]
    # Of three epochs of four and two of three: solved in two, it is away for two.
    epochs = [found[0:4], found[4:8], found[8:11], found[11:14], found[14:18]]
    assert [("a" in epoch) for epoch in epochs] == [True, True, False, False, True]
    assert all(sorted({*epoch} - {"a"}) == ["b", "c", "d"] for epoch in epochs)
    # It was solved again, and by now has been three times running.
    assert "a" not in found[18:21]


def test_one_that_is_failed_again_stays() -> None:
    order = TaskOrder(["a", "b"], 1, seed=0, skip_solved=2)
    seen: Counter[str] = Counter()

    def solved(task: str) -> bool:
        seen[task] += 1
        return task == "a" and seen["a"] % 2 == 1

    found = [task for (task,) in visits(order, 20, solved)]
    assert Counter(found) == {"a": 10, "b": 10}


def test_where_too_few_are_left_for_a_step_nobody_rests() -> None:
    order = TaskOrder(["a", "b", "c"], 2, seed=0, skip_solved=1)
    assert all(len(set(tasks)) == 2 for tasks in visits(order, 12, lambda task: True))


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_run_that_goes_on_chooses_as_one_that_never_stopped(behind: int) -> None:
    def solved(task: str) -> bool:
        return int(task.removeprefix("task")) % 3 == 0

    whole = TaskOrder(NINETY, 16, seed=5, skip_solved=1, behind=behind)
    found = visits(whole, 30, solved)
    resumed = TaskOrder(NINETY, 16, seed=5, skip_solved=1, behind=behind)
    for step, tasks in enumerate(found[:20], start=1):
        resumed.note(step, [task for task in tasks if solved(task)])
    assert resumed.tasks(21) == found[20]
    # With staleness the last step's verdicts are not there when the next one begins.
    before = TaskOrder(NINETY, 16, seed=5, skip_solved=1, behind=behind)
    for step, tasks in enumerate(found[: 20 - behind], start=1):
        before.note(step, [task for task in tasks if solved(task)])
    assert before.tasks(21) == found[20]


@pytest.mark.parametrize(
    "changed",
    [
        {"skip_solved": 1},
        {"skip_solved": 3},
        {"skip_solved": None},
        {"seed": 9},
        {"per_step": 8},
        {"behind": 0},
    ],
)
def test_a_run_that_goes_on_by_other_rules_keeps_what_it_chose(changed: dict[str, Any]) -> None:
    def solved(task: str) -> bool:
        return int(task.removeprefix("task")) % 3 == 0

    by = OrderRules(per_step=16, seed=5, skip_solved=2, behind=1)
    found = visits(TaskOrder(NINETY, 16, seed=5, skip_solved=2, behind=1), 12, solved)
    now = asdict(replace(by, **changed))
    resumed = resumed_with(NINETY, (NINETY, 12, by), **now)
    for step, tasks in enumerate(found, start=1):
        resumed.note(step, [task for task in tasks if solved(task)])
    assert epochs_of(resumed, 12) == found
    assert len(resumed.tasks(13)) == now["per_step"]
    # What is left of the epoch, in which steps 11 and 12 are, comes before anything comes again.
    assert not {*resumed.tasks(13)} & {*found[10], *found[11]}


def test_visits_before_a_run_went_on_by_other_rules_count() -> None:
    by = OrderRules(per_step=1, seed=0, skip_solved=None, behind=0)
    before = visits(TaskOrder(["a", "b", "c", "d"], 1, seed=0), 8, lambda task: task == "a")
    resumed = resumed_with("abcd", ("abcd", 8, by), per_step=1, seed=0, skip_solved=3)
    for step, tasks in enumerate(before, start=1):
        resumed.note(step, [task for task in tasks if task == "a"])
    found = []
    for step in range(9, 22):
        found += resumed.tasks(step)
        resumed.note(step, [task for task in found[-1:] if task == "a"])
    # Solved in two epochs before and in one since, it is away for three.
    assert sorted(found[:4]) == ["a", "b", "c", "d"]
    assert found[4:].count("a") == 0


def test_a_tasks_pass_rate_is_that_of_all_its_verdicts() -> None:
    def group(**changes: Any) -> Group:
        found = Group(step=1, index=0, task_id="t", prompt=())
        usual: dict[str, Any] = {"criteria": 2, "surviving": (0,), "unanimous": (), "scored": (0, 1), "rewards": (0, 0)}
        found.reward = RewardSummary(**usual | {"applicable": 4, "passed": 3} | changes)
        return found

    assert group_pass_rate(group()) == 0.75
    assert group_pass_rate(group(criteria=0, applicable=0, passed=0)) == 1.0
    # Of whom nothing is known is neither easy nor hard.
    assert group_pass_rate(group(applicable=0, passed=0)) is None
    assert group_pass_rate(group(criteria=0, scored=())) is None
    assert group_pass_rate(Group(step=1, index=0, task_id="t", prompt=())) is None


def test_a_group_is_solved_when_nobody_failed_anything_and_all_were_scored() -> None:
    def group(**changes: Any) -> Group:
        found = Group(step=1, index=0, task_id="t", prompt=())
        usual: dict[str, Any] = {
            "criteria": 2,
            "surviving": (),
            "unanimous": (),
            "scored": (0, 1),
            "rewards": (0.0, 0.0),
        }
        found.reward = RewardSummary(**usual | {"applicable": 2, "passed": 2} | changes)
        return found

    assert solved(group(), 2)
    assert not solved(group(surviving=(1,), passed=1), 2)
    # What all fail survives mixed_only no more than what all pass; with no_dropout everything survives.
    assert not solved(group(passed=0), 2)
    assert solved(group(surviving=(0, 1)), 2)
    assert solved(group(criteria=0, applicable=0, passed=0), 2)
    assert not solved(group(applicable=0, passed=0), 2)
    # Of whom nothing is known may have failed.
    assert not solved(group(scored=(0,)), 2)
    assert not solved(Group(step=1, index=0, task_id="t", prompt=()), 2)


@pytest.mark.parametrize("setting", ["random", "outcome"])
def test_without_a_judge_nothing_says_what_is_solved(setting: str) -> None:
    config = load_config("sandbox", ["train.skip_solved=2"], setting)
    with pytest.raises(ConfigError, match=rf"train\.skip_solved: .* algorithm\.reward must be rubric, found {setting}"):
        task_order(config, NINETY)


def test_what_is_configured_is_what_the_order_goes_by() -> None:
    judged = task_order(load_config("sandbox", ["train.skip_solved=1", "train.prompts_per_step=45"], "draco"), NINETY)
    judged.note(1, judged.tasks(1))
    judged.note(2, [])
    assert not {*judged.tasks(3)} & {*judged.tasks(1)}
