"""The wheel is the whole product: built, installed on its own, and used from another folder.

Its dependencies are the test environment's, seen through a path file; the checkout is out of sight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import draco_ray
from draco_ray.environments.appworld.interpreter import appworld_python
from draco_ray.judging.phases import PHASES
from draco_ray.judging.prompts import render_phase
from draco_ray.runs.directory import RunDirectory
from tests.conftest import REPOSITORY
from tests.support.rewards import check_rubric_run
from tests.support.worlds import files

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def run(*command: str | Path, cwd: Path, appworld: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as from a user's shell: nothing points at the checkout."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DRACO_APPWORLD_PYTHON")
    }
    if appworld is not None:
        environment["DRACO_APPWORLD_PYTHON"] = appworld
    # As on hosts where what a user makes is closed to others.
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, umask=0o077
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a source distribution, which therefore lacks nothing either."""
    root = tmp_path_factory.mktemp("build")
    source = root / "source"
    source.mkdir()
    for file in subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0"):
        if (REPOSITORY / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, source / file)
    build = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", build, "build_sdist", root, cwd=source)
    (archive,) = root.glob("*.tar.gz")
    shutil.unpack_archive(archive, root)
    unpacked = root / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", build, "build_wheel", root, cwd=unpacked)
    (built,) = root.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of an empty environment that holds the wheel alone."""
    root = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", root, cwd=root)
    python = root / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=root)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    dependencies = Path(sysconfig.get_path("purelib"))
    # A plain path line: the path files in there, an editable install's among them, are not read.
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    # What clashes with AppWorld's own packages lies beside the package, as in any installation.
    for clashing in ("pydantic", "pydantic_core"):
        (site_packages / clashing).symlink_to(dependencies / clashing)
    return root / "bin"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has nothing to do with the checkout."""
    return tmp_path_factory.mktemp("elsewhere")


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "draco_ray", "prompts"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    expected = {f"draco_ray/{file}" if file.startswith("prompts/") else file for file in tracked}
    assert expected
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == expected


def test_it_is_the_wheel_that_is_imported(installed: Path, elsewhere: Path) -> None:
    assert run(installed / "draco", "--version", cwd=elsewhere).stdout == f"draco-ray {draco_ray.__version__}\n"
    where = run(installed / "python", "-c", "import draco_ray; print(draco_ray.__file__)", cwd=elsewhere).stdout
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert not Path(where.strip()).is_relative_to(Path(draco_ray.__file__).parent)


RENDER = """
import contextlib, sys
from draco_ray.cli import main
for phase in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main(["prompts", "render", phase])
"""


def test_its_presets_and_prompts_are_found_from_any_folder(installed: Path, elsewhere: Path) -> None:
    assert "setting: draco" in run(installed / "draco", "config", "qwen3.6-27b", cwd=elsewhere).stdout
    # One process for all phases; it is the entry point of the command.
    shown = run(installed / "python", "-c", RENDER, *PHASES, cwd=elsewhere).stdout
    assert shown == "".join(render_phase(phase, REPOSITORY / "prompts" / "judge") + "\n" for phase in PHASES)


def test_a_world_is_built_and_a_policy_trained_for_a_step(
    installed: Path, elsewhere: Path, sandbox_root: Path, starter_model: Path, tmp_path: Path
) -> None:
    appworld = appworld_python(None)
    built = run(
        installed / "draco", "sandbox", "build", "--scenarios", "1", "--seed", "7", cwd=elsewhere, appworld=appworld
    )
    assert "sandbox" in built.stdout
    assert [path.name for path in (elsewhere / ".cache").iterdir()] == ["sandbox"]
    assert (elsewhere / ".cache" / "sandbox" / "sandbox.json").is_file()
    # Made anew, API docs are what they were, to the byte (databases and tasks: test_sandbox_world).
    docs = Path("data") / "api_docs"
    assert files(elsewhere / ".cache" / "sandbox" / docs) == files(sandbox_root / docs)
    overrides = [
        f"model.path={starter_model}",
        "--setting",
        "static-credit",
        "run.name=one",
        "data.eval_split=dev",
        "train.evaluate_before_after=false",
        "train.steps=1",
        "train.prompts_per_step=2",
        "learner.minibatch_prompts=1",
        "algorithm.group_size=3",
        "environment.slots=6",
        "judge.workers=1",
        "environment.slots_per_worker=6",
        "ray.dashboard=false",
    ]
    done = run(installed / "draco", "train", "sandbox", *overrides, cwd=elsewhere, appworld=appworld)
    trained = RunDirectory.open(elsewhere / "runs" / "one")
    logs = "".join(file.read_text(encoding="utf-8") for file in (trained.path / "logs").glob("*.jsonl"))
    assert trained.table("trajectories").num_rows == 6, done.stdout + done.stderr + logs
    # The run is also that of the setting with a static rubric and credit (the others: tests/e2e/test_settings.py).
    rewards = check_rubric_run(trained, credit=True)
    assert len(rewards) == 2
    assert any(any(group) for group in rewards.values())
    phases = {call["phase"] for call in trained.table("judge_calls").to_pylist()}
    assert "score" in phases
    assert phases <= {"score", "credit"}
    report = tmp_path / "report.html"
    run(installed / "draco", "report", trained.path, "--out", report, cwd=elsewhere)
    assert "</html>" in report.read_text(encoding="utf-8")
