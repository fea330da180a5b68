"""A small sandbox built, verified and opened with AppWorld's own engine, in AppWorld's own Python."""

import json
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from draco_ray.environments.appworld_python import appworld_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*arguments: str, root: Path | None = None, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    """Run AppWorld's Python from the repository."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": hash_seed}
    environment |= {"HOME": os.environ["HOME"]} | ({"APPWORLD_ROOT": str(root)} if root else {})
    return subprocess.run(
        [appworld_python(None), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=environment,
    )


def sandbox(*arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "draco_ray.environments.sandbox", *arguments, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sandbox") / "world"
    built = sandbox("build", "--out", str(root), "--seed", "5", "--scenarios", "2", "--users", "20", hash_seed="1")
    assert built.returncode == 0, built.stderr
    return root


def manifest(root: Path) -> dict:
    return json.loads((root / "sandbox.json").read_text())


def test_the_same_seed_gives_the_same_world_again(world: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    built = sandbox("build", "--out", str(again), "--seed", "5", "--scenarios", "2", "--users", "20", hash_seed="2")
    assert built.returncode == 0, built.stderr
    assert manifest(again) == manifest(world)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_an_up_to_date_world_is_left_as_it_is(world: Path) -> None:
    before = (world / "sandbox.json").stat().st_mtime_ns
    built = sandbox("build", "--out", str(world), "--seed", "5", "--scenarios", "2", "--users", "20")
    assert built.returncode == 0
    assert "up to date" in built.stdout
    assert (world / "sandbox.json").stat().st_mtime_ns == before


def test_verify_passes_and_leaves_the_world_unchanged(world: Path) -> None:
    before = sorted(world.rglob("*"))
    verified = sandbox("verify", "--root", str(world))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "verify: 24/24 tasks" in verified.stdout
    assert sorted(world.rglob("*")) == before


def test_verify_reports_a_task_whose_ground_truth_is_wrong(world: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(world, broken)
    entries = manifest(broken)
    task_id = next(task for task, entry in entries["tasks"].items() if entry["family"] == "count_contacts_born")
    entries["tasks"] = {task_id: entries["tasks"][task_id]}
    (broken / "sandbox.json").write_text(json.dumps(entries))
    (broken / "data" / "tasks" / task_id / "ground_truth" / "answer.json").write_text("12345")
    verified = sandbox("verify", "--root", str(broken), "--jobs", "1")
    assert verified.returncode == 1
    assert f"verify: {task_id} (count_contacts_born): the reference fails: The answer" in verified.stdout


def test_a_change_too_many_fails_a_task_that_is_otherwise_solved(world: Path, tmp_path: Path) -> None:
    copied = tmp_path / "world"
    shutil.copytree(world, copied)
    code = """
    import json
    from appworld.environment import AppWorld
    from draco_ray.environments.sandbox.scripts import families

    tasks = json.load(open("sandbox.json"))["tasks"]
    task_id = next(task for task, entry in tasks.items() if entry["family"] == "count_library_songs")
    extra = "apis.spotify.like_song(song_id=[s for s in range(1, 281) if s not in mine][0], access_token=spotify_token)"
    for cells in ([], ["mine = [s['song_id'] for s in rows]", extra]):
        with AppWorld(task_id=task_id) as world:
            for cell in families()["count_library_songs"].script()[:-1] + cells:
                world.execute(cell)
            world.execute(families()["count_library_songs"].script()[-1])
            report = world.evaluate()
            print("RESULT", report.success, [failure["requirement"] for failure in report.failures])
    """
    script = tmp_path / "extra.py"
    script.write_text(textwrap.dedent(code).replace('"sandbox.json"', repr(str(copied / "sandbox.json"))))
    done = run(str(script), root=copied)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == ["RESULT True []", "RESULT False ['Only the expected models have changed.']"], done.stderr


def test_tasks_open_without_their_ground_truth(world: Path, tmp_path: Path) -> None:
    blind = tmp_path / "blind"
    shutil.copytree(world, blind, ignore=shutil.ignore_patterns("ground_truth"))
    task_id = (blind / "data" / "datasets" / "train.txt").read_text().split()[0]
    code = f"""
    from appworld.environment import AppWorld

    with AppWorld(task_id="{task_id}", load_ground_truth=False) as world:
        print(world.task.instruction)
        print(world.execute('print(apis.supervisor.show_active_task()["instruction"])'))
    """
    script = tmp_path / "open.py"
    script.write_text(textwrap.dedent(code))
    opened = run(str(script), root=blind)
    specs = json.loads((blind / "data" / "tasks" / task_id / "specs.json").read_text())
    assert opened.stdout.split("\n")[:2] == [specs["instruction"]] * 2, opened.stderr


def test_a_folder_that_is_no_sandbox_gives_one_line_and_status_2(tmp_path: Path) -> None:
    verified = sandbox("verify", "--root", str(tmp_path))
    assert verified.returncode == 2
    assert verified.stderr.startswith("error: ")
    assert len(verified.stderr.splitlines()) == 1
