"""Properties of this machine, values of the preset `cpu` that depend on them, and the thread settings of a process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

GIB = 1 << 30
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo on x86 and ARM; CPUs without them emulate bfloat16, which is slower than float32."""


def cores() -> int:
    """Number of cores available to this process and its container."""
    found = len(os.sched_getaffinity(0))
    limits = [text.split() for text in _limits("cpu", "cpu.max")]
    first = zip(_limits("cpu", "cpu.cfs_quota_us"), _limits("cpu", "cpu.cfs_period_us"), strict=True)
    for quota, period in (*limits, *first):
        if quota.isdigit():
            found = min(found, max(1, int(quota) // int(period)))
    return found


def memory_bytes() -> int:
    """Memory of the machine or, if smaller, of this container."""
    limits = (*_limits("memory", "memory.max"), *_limits("memory", "memory.limit_in_bytes"))
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([found, *(int(limit) for limit in limits if limit.isdigit())])


def _limits(controller: str, name: str) -> list[str]:
    """Contents of the file ``name`` in this process's control group and all groups above it (cgroups version 1 or 2).

    A number in digits is a limit; any other word, such as ``max`` or ``-1``, means that there is none.
    """
    found = []
    with suppress(OSError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS
            # In a container the lower folders of this path may be missing, or its own group may be the root folder.
            own = root / group.lstrip("/")
            files = (folder / name for folder in (own, *own.parents) if folder.is_relative_to(root))
            found += [file.read_text(encoding="utf-8").strip() for file in files if file.is_file()]
    return found


def has_gpu() -> bool:
    """Whether there is an NVIDIA or AMD GPU; a container's NVIDIA GPU may have another number than 0."""
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16."""
    with suppress(OSError):
        return not BFLOAT16_FLAGS.isdisjoint(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return False


def thread_env_vars(cpus: float) -> dict[str, str]:
    """Environment variables for a process that computes on ``cpus`` cores, at least one.

    Unless OMP_WAIT_POLICY is set, its threads sleep while waiting for each other; spinning is ten times slower on a
    busy machine.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, int(cpus))),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def set_threads(cpus: float) -> None:
    """Set the number of OpenMP and PyTorch threads of this process (`thread_env_vars`).

    Call it before PyTorch is imported, because PyTorch reads these environment variables only when it is imported.
    """
    os.environ.update(thread_env_vars(cpus))
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(1, int(cpus)))


def cpu_values() -> dict[str, Any]:
    """Values of the preset `cpu` that depend on the machine."""
    memory = memory_bytes() / GIB
    # Half of the cores for the engine and half for the learner, because both compute at the same time.
    threads = max(1, cores() // 2)
    return {
        "model": {"dtype": "bfloat16" if has_bfloat16() else "float32"},
        "engine": {"cpus_per_engine": threads, "kv_cache_gib": min(8.0, max(0.5, round(memory / 16, 1)))},
        "learner": {"cpus_per_worker": threads, "micro_batch_tokens": 4096 if memory > 12 else 2048},
    }
