"""vLLM's own classes of both base models import with the torchvision that GPU nodes have, without any stub.

Checked beside the CPU build of torch, in which vLLM, transformers and the rest are of the GPU lock's versions
(`tests/unit/test_lock_files.py`). torchvision's compiled part wants CUDA libraries and does not load there; it would
declare operators, and importing torchvision needs the two that are declared here instead.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.deployment]

IMPORT = """
import importlib, json, torch
if not torch.version.cuda:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import torchvision, transformers
classes = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen2": "Qwen2ForCausalLM"}
found = {
    name: getattr(importlib.import_module("vllm.model_executor.models." + name), name_of_class).__module__
    for name, name_of_class in classes.items()
}
print(json.dumps({"classes": found, "torchvision": torchvision.__version__, "file": torchvision.__file__}))
"""


@pytest.fixture(scope="module")
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the GPU lock names, checked against its hashes, in a folder of its own."""
    folder = tmp_path_factory.mktemp("torchvision")
    lock = (REPOSITORY / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^torchvision==(?:.*\\\n)*.*\n", lock, re.MULTILINE)
    (folder / "requirements.txt").write_text(pinned)
    arguments = ["--no-deps", "--require-hashes", "--target", str(folder / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *arguments, "-r", str(folder / "requirements.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_both_base_models_import_without_a_stub(torchvision: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(torchvision)!r})\n{IMPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["classes"] == {name: f"vllm.model_executor.models.{name}" for name in ("qwen3_5", "qwen2")}
    assert Path(result["file"]).is_relative_to(torchvision)


def test_without_torchvision_the_larger_model_does_not_import() -> None:
    """Why the GPU lock must hold it: the day vLLM needs it no more, the lock and the stub can go."""
    code = "import vllm.model_executor.models.qwen3_5"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "torchvision" in done.stderr
