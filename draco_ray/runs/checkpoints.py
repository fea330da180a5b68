"""The files of a checkpoint, and checks of them. Imports no torch, because driver and evaluation read adapters, too.

A checkpoint is an adapter as PEFT writes it, the optimizer's state, and ``learner.json``, which has the number of
updates, the checkpoint's name and the SHA-256 of the other files. Adapters from elsewhere have no ``learner.json``, so
only their tensor values are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draco_ray.errors import DamagedRun
from draco_ray.runs.directory import STEP_PATTERN, check_regular

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, COUNTERS = "optimizer.safetensors", "learner.json"


def file_digest(file: Path) -> tuple[str, int]:
    """SHA-256 and size of a file."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest(), source.tell()


def write_counters(folder: Path, name: str, updates: int) -> None:
    """Write ``learner.json``, once the other files of the checkpoint ``name`` are in the folder.

    Raises:
        OSError: it cannot be written.
    """
    digests = {each: file_digest(folder / each)[0] for each in (ADAPTER_CONFIG, ADAPTER, OPTIMIZER)}
    counters = {"updates": updates, "checkpoint": name, "sha256": digests}
    (folder / COUNTERS).write_text(json.dumps(counters), encoding="utf-8")


def read_updates(folder: Path) -> int:
    """Number of optimizer updates up to a checkpoint, which must not be damaged."""
    return int(json.loads((folder / COUNTERS).read_text(encoding="utf-8"))["updates"])


def checkpoint_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in one line that names the file; None if it is sound."""
    return _damage(folder, (COUNTERS, ADAPTER_CONFIG, ADAPTER, OPTIMIZER))


def adapter_damage(folder: Path) -> str | None:
    """What is wrong with the adapter in a folder; ``learner.json`` and the optimizer may be missing."""
    return _damage(folder, (*((COUNTERS,) if (folder / COUNTERS).exists() else ()), ADAPTER_CONFIG, ADAPTER))


def check_adapter(folder: Path) -> None:
    """Refuse a damaged adapter.

    Raises:
        DamagedRun: `adapter_damage` found damage.
    """
    if (damage := adapter_damage(folder)) is not None:
        raise DamagedRun(f"adapter {folder} is damaged: {damage}; restore this file, or choose another checkpoint")


def _damage(folder: Path, files: Sequence[str]) -> str | None:
    from safetensors import SafetensorError

    counters: dict[str, Any] = {}
    try:
        for name in files:
            path = folder / name
            check_regular(path)
            if "sha256" in counters and file_digest(path)[0] != counters["sha256"].get(name):
                raise ValueError(f"its SHA-256 differs from the one in {COUNTERS}")
            if name == COUNTERS:
                counters = _counters(path)
            elif name == ADAPTER_CONFIG:
                if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                    raise ValueError("not a JSON object")
            else:
                steps = _check_values(path)
        # Compare the number of updates with the optimizer's, because no digest covers it.
        if OPTIMIZER in files and steps != ({counters["updates"]} if counters["updates"] else set()):
            raise ValueError(f"is of update {max(steps, default=0)}, but {COUNTERS} is of update {counters['updates']}")
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        return f"{name}: {' '.join(str(error).split())[:300]}"
    return None


def _counters(path: Path) -> dict[str, Any]:
    """The content of ``learner.json``. Raises: ValueError: its format is wrong, or it is from another checkpoint."""
    counters = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(counters, dict) or set(counters) != {"updates", "checkpoint", "sha256"}:
        raise ValueError("expected the keys updates, checkpoint and sha256")
    if type(counters["updates"]) is not int or not isinstance(counters["sha256"], dict):
        raise ValueError("expected the number of updates, and the SHA-256 of each file")
    # A checkpoint may be copied to a folder of any name except another step's.
    step, written = STEP_PATTERN.fullmatch(path.parent.name), counters["checkpoint"]
    if step is not None and written != step[0]:
        raise ValueError(f"written for checkpoint {str(written)[:50]!r}, not for this one")
    return counters


def _check_values(path: Path) -> set[int]:
    """Check the tensors of a file; returns the step counts in it. Raises: ValueError: values are not finite."""
    from safetensors import safe_open

    steps: set[int] = set()
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  # no mapping
            values = file.get_tensor(name)
            if not np.isfinite(values).all():
                raise ValueError(f"tensor {name} contains NaN or infinity")
            if name.endswith(".step"):
                steps.add(int(values))
    return steps
