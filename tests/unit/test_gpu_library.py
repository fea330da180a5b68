"""The library's desk as TRL's environment: the example's own tools, reset and evaluation."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.jobs import JOBS, load_job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(JOBS))
    return load_job("gpu_library")


def refused(row: dict[str, Any]) -> bool:
    """Nothing may be done, but the member must be told."""
    task = json.loads(row["task"])
    expected: dict[str, Any] = task["expected"]
    return expected == {"renew": [], "waive": False, "refuse": True}


def test_desks_are_apart_and_rewarded_by_the_examples_own_evaluation(job: ModuleType) -> None:
    row = next(row for row in job.tasks() if refused(row))
    task = json.loads(row["task"])
    one, other = job.desk()(), job.desk()()
    for each in (one, other):
        assert each.reset(**row) is None
    assert task["name"] in row["prompt"][1]["content"]
    assert task["name"] in one.show_member(card=task["card"])
    assert one.get_reward() == 0.0
    one.refuse(reason="it is against the rules")
    assert (one.get_reward(), other.get_reward()) == (1.0, 0.0)
    one.reset(**row)
    assert one.get_reward() == 0.0


def test_tools_keep_their_names_parameters_and_words(job: ModuleType) -> None:
    desk = job.desk()()
    tools = [name for name in dir(desk) if not name.startswith("_") and name not in ("reset", "get_reward")]
    assert tools == ["list_loans", "refuse", "renew", "show_member", "waive_fine"]
    assert list(inspect.signature(desk.renew).parameters) == ["book"]
    assert (inspect.getdoc(desk.renew) or "").startswith("Renew a loan for two weeks.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "said", "options"),
    [("gpu_library", "gpu-library", {}), ("bench_learner", "bench-learner", {"device": "cuda"})],
)
def test_without_a_gpu_it_says_so_in_a_line(
    job: ModuleType, capsys: pytest.CaptureFixture[str], name: str, said: str, options: dict[str, Any]
) -> None:
    load_job(name).main(**options)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{said}: skipped: PyTorch")


def test_a_call_whose_time_is_over_prints_and_keeps_what_there_is(
    job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(job.OutOfTime):
        job.run([sys.executable, "-c", "import time; time.sleep(600)"], time.monotonic() + 0.1)
    assert job.run([sys.executable, "-c", "raise SystemExit(3)"], math.inf) == 3

    def late(*_: object, **__: object) -> None:
        raise job.OutOfTime

    influence = {"a": 0.1, "b": -0.1, "c": 0.05, "d": -0.05}
    monkeypatch.setattr(
        job,
        "success",
        lambda _: job.ClusteredMean(mean=0.5, influence=influence, seed_variance=0.0, seeds=1, trials=20.0),
    )
    monkeypatch.setattr(job, "make_policy", late)
    monkeypatch.setattr(job.gpu_check, "why_skipped", lambda: None)
    monkeypatch.setattr(job.gpu_check, "machine", lambda device: f"a {device}")
    out = tmp_path / "result.json"
    job.gpu_check.keep(out, "step", {"machine": "another"})
    (tmp_path / "draco-0.json").write_text('{"steps": 20, "steps_an_hour": 90.0}')
    job.main(seeds=5, steps=20, sides="draco", root=tmp_path, out=out)
    printed = capsys.readouterr().out
    assert re.search(r"^\| draco \| 1 \| 20 \| 50\.0 .*\| \+0\.0 .* \| 90 \|$", printed, re.MULTILINE)
    assert printed.endswith("gpu-library: stopped after 570 s; the same command goes on from here\n")
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["step", "library, smollm2-135m"]
    assert [each["value"] for each in parts["library, smollm2-135m"]["figures"]] == [1, 50.0, 0.0, 90.0]
    assert "### library, smollm2-135m: a cuda" in job.gpu_check.table({"parts": parts})
