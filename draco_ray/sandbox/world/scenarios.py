"""Which tasks a world holds: families × splits × wordings × users, without AppWorld."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

from draco_ray.errors import WorldError
from draco_ray.sandbox.world import drafts
from draco_ray.sandbox.world.population import Person, World
from draco_ray.sandbox.world.scripts import SPLITS, VARIETIES, Draft, Family, families

SCENARIOS = {"train": 30, "dev": 10, "test_normal": 15, "test_challenge": 10}
"""Scenarios of a full world; each has TASKS_PER_SCENARIO tasks."""
TASKS_PER_SCENARIO = 3
WORDINGS = {"train": (0, 1), "dev": (2,), "test_normal": (3,), "test_challenge": (0, 1)}
"""Which of a family's wordings a split uses. Splits that share families share no wording."""
TRIES = 200
"""Parameter choices tried for one user before the next user is taken."""


@dataclass(frozen=True)
class PlannedTask:
    """A task before it is written."""

    task_id: str
    split: str
    family: Family
    person: Person
    instruction: str
    draft: Draft


def users_of_splits(people: list[Person]) -> dict[str, list[Person]]:
    """Divide the users between the splits: about a sixth each for the held-out splits, the rest for train."""
    share = max(3, len(people) // 6)
    held_out = {split: people[k * share : (k + 1) * share] for k, split in enumerate(SPLITS[1:])}
    return {"train": people[3 * share :], **held_out}


def plan_tasks(world: World, seed: int, limit: int | None = None, variety: str = VARIETIES[0]) -> list[PlannedTask]:
    """Choose every task of the world, split by split. Equal arguments give equal plans.

    Args:
        limit: maximum number of scenarios per split; None for a full world.
        variety: the variety whose families make the tasks.
    Raises: WorldError if a family finds too few users for a scenario.
    """
    users = users_of_splits(world.people)
    tasks: list[PlannedTask] = []
    for split in SPLITS:
        # Sort by name: neighbours then differ in app and difficulty, so a limited world is still mixed.
        members = sorted(
            (f for f in families().values() if f.variety == variety and split in f.splits), key=lambda f: f.name
        )
        taken: set[str] = set()
        for index in range(min(SCENARIOS[split], limit or SCENARIOS[split])):
            family, repeat = members[index % len(members)], index // len(members)
            tasks += _scenario(world, seed, split, family, repeat, users, taken)
    if len({task.task_id for task in tasks}) != len(tasks):
        raise WorldError(f"seed {seed} gives two scenarios the same id; choose another seed")
    return tasks


def _scenario(
    world: World,
    seed: int,
    split: str,
    family: Family,
    repeat: int,
    users: dict[str, list[Person]],
    taken: set[str],
) -> list[PlannedTask]:
    """The tasks of one scenario: one wording, different users and parameters. Extends ``taken``."""
    name = f"sandbox/{seed}/{split}/{family.name}/{repeat}"
    scenario = hashlib.sha256(name.encode()).hexdigest()[:7]
    rng = random.Random(name)
    wording = family.wordings[WORDINGS[split][repeat % len(WORDINGS[split])]]
    own = rng.sample(users[split], len(users[split]))
    # If too few of the split's own users give a good task, users of the training split are used.
    spare = [person for person in rng.sample(users["train"], len(users["train"])) if person not in own]
    tasks: list[PlannedTask] = []
    draft_of = getattr(drafts, family.name)
    for person in (*own, *spare):
        for _ in range(TRIES):
            try:
                draft = draft_of(world, person, rng)
            except drafts.UnusableParameters:
                continue
            key = json.dumps([family.name, person.id, draft.params])
            if key in taken:
                continue
            taken.add(key)
            task_id = f"{scenario}_{len(tasks) + 1}"
            tasks.append(PlannedTask(task_id, split, family, person, wording.format(**draft.params), draft))
            break
        if len(tasks) == TASKS_PER_SCENARIO:
            return tasks
    raise WorldError(f"family {family.name} makes only {len(tasks)} tasks in {split}; raise --users")
