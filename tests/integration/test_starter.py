"""A tiny starter policy, built twice on a small world with AppWorld and PyTorch."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draco_ray.engine.model_directory import check_model_directory
from draco_ray.environments.appworld.data_root import load_split
from draco_ray.sandbox.starter import StarterSettings, build, build_starter, demonstrations
from draco_ray.sandbox.starter.build import RECIPE
from draco_ray.sandbox.starter.demonstrations import Demonstration
from draco_ray.sandbox.world.scripts import Fault

pytestmark = pytest.mark.slow

TINY = StarterSettings(
    variants=1, epochs=1, fault_rates={Fault.PRINT_SECRET: 1.0}, hidden_size=64, intermediate_size=64, vocabulary=600
)


def files(model: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}


@pytest.fixture(scope="module")
def blind_world(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The training split alone: neither ground truth nor any other split's tasks."""
    world = tmp_path_factory.mktemp("starter") / "world"
    wanted = set(load_split(sandbox_root, "train"))

    def superfluous(folder: str, names: list[str]) -> set[str]:
        if Path(folder).name == "tasks":
            return set(names) - wanted
        return {name for name in names if name == "ground_truth"}

    shutil.copytree(sandbox_root / "data", world / "data", ignore=superfluous)
    shutil.copy(sandbox_root / "sandbox.json", world)
    return world


@pytest.fixture(scope="module")
def played() -> list[Demonstration]:
    """What the first of the builds has executed."""
    return []


@pytest.fixture(scope="module")
def tiny(blind_world: Path, played: list[Demonstration]) -> Path:
    def execute(*given: Any) -> list[Demonstration]:
        played.extend(demonstrations.execute(*given))
        return played

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "demo", SimpleNamespace(**{**vars(demonstrations), "execute": execute}))
        return build_starter(blind_world.parent / "tiny", blind_world, seed=1, settings=TINY)


def test_it_is_a_complete_model_directory_and_the_world_is_untouched(tiny: Path, blind_world: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_directory(str(tiny))
    assert sorted(path.name for path in blind_world.iterdir()) == ["data", "sandbox.json"]
    assert sorted(path.name for path in tiny.parent.iterdir()) == ["tiny", "world"]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == "qwen3"
    assert len(tokenizer) <= model.config.vocab_size
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Like all songs."}], add_generation_prompt=True)
    assert tokenizer.decode(prompt["input_ids"]).endswith("<|im_start|>assistant\n")


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    tiny: Path, blind_world: Path, played: list[Demonstration], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(drawn: list[Demonstration], *_: Any) -> list[Demonstration]:
        """With one fault that is always there, any seed has the same scripts: AppWorld need not be loaded for them."""
        assert drawn == [replace(each, outputs=()) for each in played]
        return played

    # Into the same folder, as the recipe's change would have it.
    with monkeypatch.context() as patch:
        patch.setattr(build, "demo", SimpleNamespace(**{**vars(demonstrations), "execute": execute}))
        other = build_starter(tiny.parent / "other", blind_world, seed=2, settings=TINY)
    different = files(other)
    again = files(build_starter(other, blind_world, seed=1, settings=TINY.model_copy(update={"processes": 1})))
    assert again == files(tiny)
    assert again["model.safetensors"] != different["model.safetensors"]
    assert json.loads((other / RECIPE).read_text())["seed"] == 1


def test_a_second_call_changes_nothing(tiny: Path, blind_world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert build_starter(tiny, blind_world, seed=1, settings=TINY, progress=True) == tiny
    assert "is up to date" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before
