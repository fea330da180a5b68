"""The sandbox's world and tasks as plain data, before AppWorld sees them."""

import ast
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from draco_ray.errors import ConfigError, WorldError
from draco_ray.sandbox.world import build as building
from draco_ray.sandbox.world import evaluation, population
from draco_ray.sandbox.world.population import PAGE_LIMIT, World, populate
from draco_ray.sandbox.world.scenarios import SCENARIOS, PlannedTask, plan_tasks, users_of_splits
from draco_ray.sandbox.world.scripts import VARIETIES

USERS = building.DEFAULT_USERS


@pytest.fixture(scope="module")
def world() -> World:
    return populate(seed=0, users=USERS)


@pytest.fixture(scope="module", params=VARIETIES)
def variety(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tasks(world: World, variety: str) -> list[PlannedTask]:
    return plan_tasks(world, seed=0, variety=variety)


def content(task: PlannedTask) -> tuple[object, ...]:
    return task.task_id, task.split, task.family.name, task.person, task.instruction, task.draft


def test_equal_seeds_give_equal_worlds_and_plans(world: World, tasks: list[PlannedTask], variety: str) -> None:
    again = populate(seed=0, users=USERS)
    assert again == world
    assert [content(task) for task in plan_tasks(again, seed=0, variety=variety)] == [content(task) for task in tasks]


def test_another_seed_gives_another_world(world: World) -> None:
    assert populate(seed=1, users=USERS) != world


@pytest.mark.parametrize("seed", range(1, 4))
def test_other_seeds_fill_every_scenario(seed: int, variety: str) -> None:
    counts = Counter(task.split for task in plan_tasks(populate(seed, USERS), seed, variety=variety))
    assert counts == {split: 3 * scenarios for split, scenarios in SCENARIOS.items()}


def test_splits_have_their_sizes_and_three_tasks_a_scenario(tasks: list[PlannedTask]) -> None:
    counts = Counter(task.split for task in tasks)
    assert counts["train"] == 90
    assert counts["dev"] >= 30
    assert counts["test_normal"] >= 42
    assert counts["test_challenge"] >= 30
    scenarios = defaultdict(list)
    for task in tasks:
        scenarios[task.task_id.split("_")[0]].append(task)
    for scenario, members in scenarios.items():
        assert re.fullmatch("[0-9a-f]{7}", scenario)
        assert [task.task_id[-1] for task in members] == ["1", "2", "3"]
        assert len({task.family.name for task in members}) == 1
        assert len({task.person.id for task in members}) == 3


def test_no_task_is_in_the_world_twice(tasks: list[PlannedTask]) -> None:
    assert len({(task.instruction, task.person.id) for task in tasks}) == len(tasks)


def test_splits_share_no_wording_and_few_users(world: World, tasks: list[PlannedTask]) -> None:
    users = users_of_splits(world.people)
    assert sum(map(len, users.values())) == len({p.id for people in users.values() for p in people}) == USERS
    templates: dict[str, set[tuple[str, int]]] = defaultdict(set)
    strangers = 0
    for task in tasks:
        texts = [wording.format(**task.draft.params) for wording in task.family.wordings]
        templates[task.split].add((task.family.name, texts.index(task.instruction)))
        strangers += task.person not in users[task.split]
    assert not templates["train"] & (templates["dev"] | templates["test_normal"])
    assert not templates["dev"] & templates["test_normal"]
    assert strangers <= len(tasks) // 10


def test_parameters_can_be_read_from_the_instruction(tasks: list[PlannedTask]) -> None:
    # What the reference scripts do: run their parameter cell on the instruction.
    for task in tasks:
        for cell in task.family.script():
            if not re.match("# Read the .* from the task", cell):
                continue
            scope: dict[str, object] = {"re": re, "task": task.instruction, "print": lambda *values: None}
            exec(cell, scope)
            values = {str(value) for name, value in scope.items() if not name.startswith("__")}
            expected = {str(value) for value in task.draft.params.values()}
            missing = [text for text in expected if not any(text in value for value in values)]
            assert not missing, (task.instruction, cell)


def test_lists_are_longer_than_a_page(world: World) -> None:
    for table in (
        "spotify.Playlist",
        "spotify.UserLibrarySong",
        "spotify.SongLike",
        "spotify.UserArtistFollowing",
        "phone.Contact",
        "phone.Alarm",
        "simple_note.Note",
        "todoist.Project",
    ):
        counts = Counter(row["user_id"] for row in world.tables[table])
        assert len(counts) == USERS
        assert min(counts.values()) > PAGE_LIMIT, table


def test_rows_refer_to_rows_that_exist(world: World) -> None:
    users = ("user_id", "sender_id", "receiver_id", "friend_id", "recipient_ids")
    for table, rows in world.tables.items():
        assert [row["id"] for row in rows] == list(range(1, len(rows) + 1))
        for row in rows:
            for name, value in row.items():
                if name.endswith(("_id", "_ids")) and value is not None:
                    stem = "user" if name in users else name.removesuffix("s").removesuffix("_id")
                    target = table.split(".")[0] + "." + stem.title().replace("_", "")
                    for row_id in value if name.endswith("_ids") else [value]:
                        assert 1 <= row_id <= len(world.tables[target]), (table, name)


def test_every_task_asks_for_something(tasks: list[PlannedTask]) -> None:
    for task in tasks:
        draft = task.draft
        assert (draft.answer is not None) == task.family.answers
        assert draft.answer is not None or any(c.added or c.updated or c.removed for c in draft.changes)


def test_evaluations_name_exactly_the_requirements_of_their_test_data(tasks: list[PlannedTask]) -> None:
    for task in tasks:
        code = evaluation.evaluation_code(task.draft)
        ast.parse(code)
        requirements = re.findall('with test\\("""(.+?)"""\\)', code)
        data = evaluation.test_data(task.draft)
        assert requirements == [entry["requirement"] for entry in data]
        assert {entry["label"] for entry in data} == {"no_op_fail", "no_op_pass"}
        json.dumps(evaluation.evaluation_data(task.draft))


@pytest.mark.parametrize("users", [population.MIN_USERS - 1, population.MAX_USERS + 1])
def test_a_number_of_users_out_of_range_is_refused(users: int) -> None:
    with pytest.raises(ValueError, match=f"users is {users}, expected"):
        populate(0, users)


def test_the_smallest_world_can_be_planned(variety: str) -> None:
    assert len(plan_tasks(populate(0, population.MIN_USERS), 0, limit=2, variety=variety)) == 4 * 2 * 3


def test_a_variety_has_families_of_its_own(tasks: list[PlannedTask], variety: str) -> None:
    assert {task.family.variety for task in tasks} == {variety}


def test_the_hard_variety_is_harder(world: World) -> None:
    hard = plan_tasks(world, seed=0, variety="hard")
    assert min(len(task.family.apps) for task in hard) == 2
    assert max(len(task.family.apps) for task in hard) == 3
    assert {task.family.difficulty for task in hard} == {3}
    steps = [len(task.family.script()) for task in hard]
    standard = [len(task.family.script()) for task in plan_tasks(world, seed=0)]
    assert min(steps) >= 9
    assert sum(steps) > 1.25 * sum(standard)


def test_a_folder_that_is_no_sandbox_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_appworld", lambda: "0")
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(WorldError, match="not a sandbox"):
        building.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_path_appworld_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory"):
        building.build(tmp_path / "in-memory-of")


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"tasks": 3}'])
def test_a_broken_manifest_gives_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / building.MANIFEST).write_text(text)
    with pytest.raises(WorldError, match="is not the manifest of a sandbox") as raised:
        building.read_manifest(tmp_path)
    assert "\n" not in str(raised.value)
