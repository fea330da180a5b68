"""Building the starter policy: what is refused, and that nothing heavy happens when it is there already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draco_ray.cli import app
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError, WorldError
from draco_ray.sandbox.starter import StarterSettings, build_starter
from draco_ray.sandbox.starter.build import RECIPE, _recipe
from draco_ray.sandbox.starter.settings import default_settings
from draco_ray.sandbox.world.scripts import FATAL


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder that looks like a sandbox from outside."""
    root = tmp_path / "world"
    for name in ("tasks/abc_1", "base_dbs", "api_docs", "datasets"):
        (root / "data" / name).mkdir(parents=True)
    (root / "data" / "tasks" / "abc_1" / "specs.json").write_text("{}")
    (root / "sandbox.json").write_text(json.dumps({"digest": "d1", "tasks": {}, "variety": "standard"}))
    return root


def recipe(digest: str = "d1", seed: int = 0, settings: StarterSettings | None = None) -> str:
    return _recipe({"digest": digest}, load_config("sandbox").agent, settings or StarterSettings(), seed)


def test_without_a_world_it_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(
        WorldError, match="no sandbox world at .*nowhere; run `draco sandbox build --out .*nowhere` first"
    ):
        build_starter(tmp_path / "model", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_world_of_another_variety_is_refused(tmp_path: Path, world: Path) -> None:
    with pytest.raises(WorldError, match="has variety standard, expected hard; run .* --variety hard` first"):
        build_starter(tmp_path / "model", world, variety="hard")
    with pytest.raises(WorldError, match="no sandbox world at .*nowhere; run .* --variety hard` first"):
        build_starter(tmp_path / "model", tmp_path / "nowhere", variety="hard")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / RECIPE).write_text(recipe())
    assert build_starter(tmp_path / "model", world, variety="standard") == tmp_path / "model"


def test_each_variety_has_an_agent_and_a_recipe_of_its_own(tmp_path: Path, world: Path) -> None:
    manifest = json.loads((world / "sandbox.json").read_text()) | {"variety": "hard"}
    (world / "sandbox.json").write_text(json.dumps(manifest))
    (tmp_path / "model").mkdir()
    agent, settings = load_config("sandbox-hard").agent, default_settings("hard")
    (tmp_path / "model" / RECIPE).write_text(_recipe(manifest, agent, settings, 0))
    assert build_starter(tmp_path / "model", world, variety="hard") == tmp_path / "model"
    assert _recipe(manifest, agent, settings, 0) != recipe()
    flawless = 1.0
    for fault in FATAL:
        flawless *= 1 - settings.fault_rates[fault]
    assert flawless < 0.2


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="has no starter.json, so it is not a starter policy"):
        build_starter(out, world)
    assert (out / "thesis.tex").read_text() == "years of work"


def test_an_up_to_date_model_is_left_alone_without_importing_pytorch(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / RECIPE).write_text(recipe())
    code = (
        "import sys; from pathlib import Path; from draco_ray.sandbox.starter import build_starter\n"
        f"print(build_starter(Path({str(out)!r}), Path({str(world)!r}), progress=True))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"starter: {out} is up to date", str(out), "[]"]
    assert [path.name for path in out.iterdir()] == [RECIPE]


def test_a_failed_build_leaves_the_older_model_and_nothing_else(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / RECIPE).write_text(recipe(digest="of an older world"))
    # This world has no train split: the build fails after it has begun.
    with pytest.raises(WorldError, match="no split 'train'"):
        build_starter(out, world)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "world"]
    assert (out / RECIPE).read_text() == recipe(digest="of an older world")


def test_the_recipe_changes_with_everything_that_decides_the_weights() -> None:
    assert recipe() == recipe()
    assert recipe(settings=StarterSettings(processes=7)) == recipe()
    others = [recipe(digest="d2"), recipe(seed=1), recipe(settings=StarterSettings(epochs=1))]
    assert len({recipe(), *others}) == 4


def test_the_command_reports_a_missing_world(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["starter", "build", "--world", str(tmp_path / "no"), "--out", str(tmp_path / "m")]
    )
    assert isinstance(result.exception, WorldError)
    assert "draco sandbox build" in str(result.exception)
