"""Valid learner checkpoints, written without a learner."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from draco_ray.runs.checkpoints import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, write_counters


def small_checkpoint(folder: Path, updates: int = 1, *, value: float | None = None) -> Path:
    """Write a checkpoint with a tensor of ``value`` (default: ``updates``); returns its folder."""
    folder.mkdir(parents=True)
    adapter = np.full((2, 4), updates if value is None else value, dtype=np.float32)
    save_file({"a.lora_B.weight": adapter}, folder / ADAPTER)
    config = {"r": 4, "lora_alpha": 8, "base_model_name_or_path": "owner/model"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    step = np.array(updates, dtype=np.float32)
    moments = {"0.step": step, "0.exp_avg": np.full((2, 4), step), "0.exp_avg_sq": np.full((2, 4), step)}
    save_file(moments if updates else {}, folder / OPTIMIZER)
    write_counters(folder, folder.name, updates)
    return folder
