"""Parts and commands that an installed package registers as entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draco_ray import registry
from draco_ray.algorithm.rules import RULES, find_rule
from draco_ray.cli import main
from draco_ray.config.ineffective_keys import check_training_keys
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError

MODULE = '''
import typer
from draco_ray.algorithm.rules import AdvantageRule

class Even(AdvantageRule):
    pass

app = typer.Typer()

@app.command()
def greet(name: str) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")

def add(first: int, second: int) -> None:
    """Add two numbers."""
    typer.echo(first + second)

number = 3
'''
ENTRY_POINTS = """
[draco_ray.algorithm.rule]
even = draco_addon:Even
draco = draco_addon:Even

[draco_ray.commands]
addon = draco_addon:app
addon-add = draco_addon:add
addon-gone = draco_addon_gone:app
addon-number = draco_addon:number
plan = draco_addon:add
"""


@pytest.fixture
def addon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package, installed as pip does it: a module, and its metadata beside it."""
    (tmp_path / "draco_addon.py").write_text(MODULE)
    metadata = tmp_path / "draco_addon-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draco-addon\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("draco_addon", None)


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.mark.usefixtures("addon")
def test_a_part_of_an_installed_package_has_a_name() -> None:
    assert type(find_rule("even")).__module__ == "draco_addon"
    assert type(find_rule("draco")).__module__.startswith("draco_ray."), "a built-in name keeps its meaning"
    check_training_keys(["algorithm.reliability=0.9"], load_config(None, ["algorithm.rule=even"]))
    with pytest.raises(ConfigError, match=r"did you mean 'even'.*expected draco, draco_calibrated, even, grpo"):
        find_rule("evn")


@pytest.mark.usefixtures("addon")
def test_a_command_of_an_installed_package_is_one_of_draco(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("addon", "greet", "you") == 0
    assert run("addon-add", "2", "3") == 0
    assert capsys.readouterr().out.splitlines() == ["hello you", "5"]


@pytest.mark.usefixtures("addon")
def test_a_broken_command_is_one_line_and_the_others_work(capsys: pytest.CaptureFixture[str]) -> None:
    gone = "draco: commands='addon-gone': draco_addon_gone cannot be imported: ModuleNotFoundError: No module named"
    number = "draco: commands='addon-number': expected a Typer app or a function that Typer accepts"
    for name, said in (("addon-gone", gone), ("addon-number", number)):
        assert run(name, "--option", "3") == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(said)

    assert run("--help") == 0
    shown = capsys.readouterr()
    assert "Greet" not in shown.out
    assert "addon-add" in shown.out
    assert "Add two numbers" in shown.out
    assert "train" in shown.out
    assert "addon-gone" not in shown.out
    assert [line.partition(" cannot")[0].partition(" expected")[0] for line in shown.err.splitlines()] == [
        "draco: commands='addon-gone': draco_addon_gone",
        "draco: commands='addon-number':",
    ]


def test_built_in_names_need_no_search_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(**_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(registry, "entry_points", searched)
    assert run("--version") == 0
    assert run("plan", "--help") == 0
    registry.find_component("algorithm.rule", "draco", RULES)
    registry.find_component("algorithm.rule", "statistics:mean", RULES)
    with pytest.raises(AssertionError, match="searched"):
        registry.find_component("algorithm.rule", "drako", RULES)
