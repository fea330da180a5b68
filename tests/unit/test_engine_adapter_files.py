"""Adapter versions on disk: fresh paths, readable by PEFT, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import load_file

from draco_ray.engine.adapter_files import AdapterFiles, engine_tensor_name
from draco_ray.errors import EngineError
from draco_ray.records import Adapter

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def adapter(version: int, fill: float = 1.0) -> Adapter:
    tensors = {NAME: np.full((3, 2), fill, np.float32), NAME.replace("lora_B", "lora_A"): np.ones((2, 4), np.float32)}
    config: dict[str, object] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    return Adapter(version=version, config=config, tensors=tensors)


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    files = AdapterFiles(tmp_path / "adapters", "run", "engine-0")
    files.clear()
    return files


def test_a_version_reads_back_and_its_config_is_pefts(files: AdapterFiles) -> None:
    path = files.write(adapter(3), ["Qwen3ForCausalLM"])
    assert path.name == "v3"
    read = load_file(path / "adapter_model.safetensors")
    assert np.array_equal(read[NAME], np.ones((3, 2)))
    config = LoraConfig.from_pretrained(path)
    assert (config.r, config.lora_alpha) == (2, 4)


def test_no_path_is_ever_used_twice(files: AdapterFiles) -> None:
    paths = []
    for version in (1, 2, 2, 2, 1):
        paths.append(files.write(adapter(version), []))
        files.discard(paths[-1])
    assert len(set(paths)) == len(paths)
    assert not any(path.exists() for path in paths)


def test_a_set_in_the_config_is_written_sorted(files: AdapterFiles) -> None:
    odd = adapter(1)
    odd.config["target_modules"] = {"v_proj", "q_proj"}
    path = files.write(odd, [])
    assert json.loads((path / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


def test_clearing_removes_what_a_killed_engine_left(files: AdapterFiles) -> None:
    files.write(adapter(1), [])
    AdapterFiles(files.directory.parents[1], "run", "engine-0").clear()
    assert list(files.directory.iterdir()) == []


def test_removing_leaves_other_engines_alone_and_the_last_takes_the_runs_directory(files: AdapterFiles) -> None:
    other = AdapterFiles(files.directory.parents[1], "run", "engine-1")
    other.clear()
    files.remove()
    assert other.directory.is_dir()
    other.remove()
    assert not other.directory.parent.exists()
    other.remove()


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match=r"^adapter directory .*file/run/engine-0: .*engine.adapter_directory") as e:
        AdapterFiles(tmp_path / "file", "run", "engine-0").clear()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen3ForCausalLM", NAME),
        ("Qwen2ForCausalLM", NAME),
        ("Qwen3_5ForCausalLM", NAME),
        ("Qwen3_5ForConditionalGeneration", NAME.replace("model.layers", "model.language_model.layers")),
    ],
)
def test_names_follow_the_checkpoints_architecture(architecture: str, expected: str) -> None:
    assert engine_tensor_name(NAME, [architecture]) == expected
    assert engine_tensor_name(expected, [architecture]) == expected
