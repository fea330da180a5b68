"""Adapter versions on disk: fresh paths, readable by PEFT, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
def files(tmp_path: Path) -> Iterator[AdapterFiles]:
    files = AdapterFiles(tmp_path / "adapters")
    files.open()
    yield files
    files.remove()


def test_a_version_reads_back_and_its_config_is_pefts(files: AdapterFiles) -> None:
    path = files.write(adapter(3), ["Qwen3ForCausalLM"])
    read = load_file(path / "adapter_model.safetensors")
    assert np.array_equal(read[NAME], np.ones((3, 2)))
    config = LoraConfig.from_pretrained(path)
    assert (config.r, config.lora_alpha) == (2, 4)


def test_no_path_is_ever_used_twice(files: AdapterFiles) -> None:
    paths = []
    for version in (1, 2, 2, 2, 1):
        paths.append(files.write(adapter(version), []))
        shutil.rmtree(paths[-1])
    assert len(set(paths)) == len(paths)
    assert not any(path.exists() for path in paths)


def test_a_set_in_the_config_is_written_sorted(files: AdapterFiles) -> None:
    odd = adapter(1)
    odd.config["target_modules"] = {"v_proj", "q_proj"}
    path = files.write(odd, [])
    assert json.loads((path / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


def test_what_a_killed_engine_left_goes_when_another_starts(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom draco_ray.engine.adapter_files import AdapterFiles\n"
        "files = AdapterFiles(Path(sys.argv[1]))\nfiles.open()\n(files.directory / 'v1').mkdir()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    (left,) = root.glob("*/*/v1")
    files = AdapterFiles(root)
    files.open()
    assert not left.exists()
    assert files.directory.is_dir()
    files.remove()
    files.remove()


def test_an_engine_removes_only_its_own_files(files: AdapterFiles) -> None:
    path = files.write(adapter(1), [])
    other = AdapterFiles(files.directory.parents[1])
    other.open()
    other.remove()
    assert path.is_dir()


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match=r"^adapter directory .*file: .*engine.adapter_directory") as e:
        AdapterFiles(tmp_path / "file").open()
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
def test_names_follow_the_checkpoints_architecture(files: AdapterFiles, architecture: str, expected: str) -> None:
    assert expected in load_file(files.write(adapter(1), [architecture]) / "adapter_model.safetensors")
    assert engine_tensor_name(NAME, [architecture]) == expected
    assert engine_tensor_name(expected, [architecture]) == expected
