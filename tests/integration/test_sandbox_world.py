"""A small sandbox built, verified and opened with AppWorld's own engine, in AppWorld's own Python."""

import json
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.sandbox.world.scripts import families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
WORLD = ("--seed", "7", "--scenarios", "2", "--users", "20")
"""How the fixture ``sandbox_root`` is built."""


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
    return run("-m", "draco_ray.sandbox.world", *arguments, **options)  # type: ignore[arg-type]


def manifest(root: Path) -> dict:
    return json.loads((root / "sandbox.json").read_text())


def files(root: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_same_seed_gives_the_same_world_to_the_byte(sandbox_root: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    built = sandbox("build", "--out", str(again), *WORLD, hash_seed="2")
    assert built.returncode == 0, built.stderr
    made, expected = files(again), files(sandbox_root)
    assert sorted(made) == sorted(expected)
    assert [path for path in made if made[path] != expected[path]] == []
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_an_up_to_date_world_is_left_as_it_is(sandbox_root: Path) -> None:
    before = (sandbox_root / "sandbox.json").stat().st_mtime_ns
    built = sandbox("build", "--out", str(sandbox_root), *WORLD)
    assert built.returncode == 0
    assert "up to date" in built.stdout
    assert (sandbox_root / "sandbox.json").stat().st_mtime_ns == before


def test_a_world_in_place_of_another_verifies_for_every_family(sandbox_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "world"
    shutil.copytree(sandbox_root, root)
    built = sandbox("build", "--out", str(root), "--seed", "8", "--users", "20")
    assert built.returncode == 0, built.stderr
    entries = manifest(root)
    assert len(entries["tasks"]) == 195
    first = {entry["family"]: task for task, entry in reversed(entries["tasks"].items())}
    assert sorted(first) == sorted(name for name, family in families().items() if family.variety == "standard")
    # One task a family, for time; `draco sandbox verify` runs them all.
    entries["tasks"] = {task: entries["tasks"][task] for task in first.values()}
    (root / "sandbox.json").write_text(json.dumps(entries))

    before = files(root)
    verified = sandbox("verify", "--root", str(root))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"verify: {len(first)}/{len(first)} tasks" in verified.stdout
    rows = [line.split() for line in verified.stdout.splitlines()]
    # Nine runs: idle, reference, four with a fatal fault, three with a harmless one.
    assert ["count_contacts_born", "phone", "1", "1", "0", "0", "0", "9", "0"] in rows
    assert files(root) == before


def test_the_hard_world_verifies_for_every_family(hard_sandbox_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "world"
    shutil.copytree(hard_sandbox_root, root)
    entries = manifest(root)
    first = {entry["family"]: task for task, entry in reversed(entries["tasks"].items())}
    assert sorted(first) == sorted(name for name, family in families().items() if family.variety == "hard")
    entries["tasks"] = {task: entries["tasks"][task] for task in first.values()}
    (root / "sandbox.json").write_text(json.dumps(entries))
    verified = sandbox("verify", "--root", str(root))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"verify: {len(first)}/{len(first)} tasks" in verified.stdout
    rows = [line.split() for line in verified.stdout.splitlines()]
    assert ["note_of_senders", "phone+venmo+simple_note", "3", "1", "0", "0", "0", "9", "0"] in rows


def test_verify_has_one_line_for_each_failing_task(sandbox_root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sandbox_root, broken)
    entries = manifest(broken)
    untrue, missing = [task for task, entry in entries["tasks"].items() if entry["family"] == "count_contacts_born"][:2]
    entries["tasks"] = {task: entries["tasks"][task] for task in (untrue, missing)}
    (broken / "sandbox.json").write_text(json.dumps(entries))
    (broken / "data" / "tasks" / untrue / "ground_truth" / "answer.json").write_text("12345")
    shutil.rmtree(broken / "data" / "tasks" / missing)
    verified = sandbox("verify", "--root", str(broken))
    assert verified.returncode == 1
    lines = verified.stdout.splitlines()
    [first] = [line for line in lines if untrue in line]
    assert first.startswith(f"verify: {untrue} (count_contacts_born): the reference fails: The answer")
    [second] = [line for line in lines if missing in line]
    assert second.startswith(f"verify: {missing} (count_contacts_born): cannot be run: ")
    assert lines[-1] == "verify: 2 failing tasks"


UNEXPECTED_MODELS = "Only the expected models have changed."
EXTRA = {
    "sandbox_root": [
        (
            "count_contacts_born",
            'apis.phone.delete_contact(contact_id=rows[0]["contact_id"], access_token=phone_token)',
            UNEXPECTED_MODELS,
        )
    ],
    "hard_sandbox_root": [
        (
            "deny_relation_requests",
            'apis.phone.delete_contact(contact_id=people[0]["contact_id"], access_token=phone_token)',
            UNEXPECTED_MODELS,
        ),
        (
            "deny_relation_requests",
            "other = [r for r in rows if r not in requests][0]\n"
            'apis.venmo.deny_payment_request(payment_request_id=other["payment_request_id"], access_token=venmo_token)',
            "The changed rows of venmo.PaymentRequest are exactly the expected ones.",
        ),
    ],
}
"""By world: a family, what is done too much, and what that breaks."""


@pytest.mark.parametrize("world", EXTRA)
def test_a_change_too_many_fails_a_task_that_is_otherwise_solved(
    request: pytest.FixtureRequest, tmp_path: Path, world: str
) -> None:
    copied = tmp_path / "world"
    shutil.copytree(request.getfixturevalue(world), copied)
    code = f"""
    import json
    from appworld.environment import AppWorld
    from draco_ray.sandbox.world.scripts import families

    tasks = json.load(open({str(copied / "sandbox.json")!r}))["tasks"]
    for family, extra in {[each[:2] for each in EXTRA[world]]!r}:
        task_id = next(task for task, entry in tasks.items() if entry["family"] == family)
        *cells, completion = families()[family].script()
        for script in ([*cells, completion], [*cells, extra, completion]):
            with AppWorld(task_id=task_id) as world:
                for cell in script:
                    world.execute(cell)
                report = world.evaluate()
                print("RESULT", report.success, [failure["requirement"] for failure in report.failures])
    """
    script = tmp_path / "extra.py"
    script.write_text(textwrap.dedent(code))
    done = run(str(script), root=copied)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    expected = [["RESULT True []", f"RESULT False [{broken!r}]"] for *_, broken in EXTRA[world]]
    assert results == [line for each in expected for line in each], done.stderr


def test_a_folder_that_is_no_sandbox_gives_one_line_and_status_2(tmp_path: Path) -> None:
    verified = sandbox("verify", "--root", str(tmp_path))
    assert verified.returncode == 2
    assert verified.stderr.startswith(f"draco: {tmp_path} holds no sandbox.json")
    assert len(verified.stderr.splitlines()) == 1
