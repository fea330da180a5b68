"""Which tasks a step trains on."""

from __future__ import annotations

import pytest

from draco_ray.errors import ConfigError
from draco_ray.training.order import TaskOrder

NINETY = [f"task{index:02d}" for index in range(90)]


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
    with pytest.raises(ConfigError, match="train.prompts_per_step is 16"):
        TaskOrder(NINETY[:3], 16, seed=0)
