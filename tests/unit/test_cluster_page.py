"""docs/cluster.md: its metrics exist, and its figures are the preset's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draco_ray.config.load import load_config
from draco_ray.observability.catalogue import CATALOGUE
from draco_ray.training.cluster import check_resources
from draco_ray.training.preflight import step_size

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "cluster.md").read_text(encoding="utf-8")


def test_every_metric_exists() -> None:
    named = set(re.findall(r"\bdraco_(?!ray)\w+", PAGE))
    assert named <= {metric.name for metric in CATALOGUE}


def test_the_figures_are_those_of_the_preset() -> None:
    config = load_config("qwen3.6-27b")
    size = step_size(config)
    assert size.adapter / 2**30 == pytest.approx(0.43, abs=0.01)
    assert size.object_store / 2**30 == pytest.approx(1.0, abs=0.1)
    assert size.disk / 1e9 == pytest.approx(2.0, abs=0.05)
    assert (config.train.prompts_per_step, config.algorithm.group_size) == (16, 6)
    # What section 1 asks for is just enough.
    check_resources(config, [{"CPU": 54, "GPU": 8, "judge": 3}])
    check_resources(
        config.model_copy(update={"train": config.train.model_copy(update={"evaluate_before_after": True})}),
        [{"CPU": 102, "GPU": 8, "judge": 3}],
    )
