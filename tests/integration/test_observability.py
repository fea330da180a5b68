"""What a run tells its watchers, through a real Ray: Prometheus' view of the metrics, event files, log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES
from draco_ray.observability.catalogue import CATALOGUE, Kind
from draco_ray.observability.logs import set_log_context, start_run_log, stop_run_log
from draco_ray.training.cluster import start_ray
from draco_ray.training.progress import RunObserver
from tests.support.observed_run import REPORT_SECONDS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("runs") / "watched"
    run.mkdir()
    start_run_log(run)
    start_ray(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
    yield run
    ray.shutdown()
    stop_run_log()


def value(series: dict[str, float], name: str, **tags: str) -> float:
    """The one series of that name with those tags."""
    found = [
        number
        for key, number in series.items()
        if key.startswith(name + "{") and all(f'{tag}="{text}"' in key for tag, text in tags.items())
    ]
    (only,) = found
    return only


def test_prometheus_sees_every_metric_of_the_catalogue(tmp_path: Path) -> None:
    run = tmp_path / "watched"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.observed_run", str(run)],
        env={
            **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": str(REPOSITORY),
            "RAY_metrics_report_interval_ms": str(1000 * REPORT_SECONDS),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    series = seen["at first"]
    names = {key.split("{")[0] for key in series}
    wanted = {metric.series[0] for metric in CATALOGUE}
    assert wanted - names == set()
    assert {name for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM for name in metric.series} <= names
    assert value(series, "ray_draco_rollouts_total", ended="turn_limit", run="watched") == 1
    assert value(series, "ray_draco_judge_phases_total", phase="score", outcome="ok") == 1
    assert value(series, "ray_draco_judge_phases_total", phase="score", outcome="failed") == 1
    assert value(series, "ray_draco_judge_tokens_total", phase="union", kind="input") == 90
    assert value(series, "ray_draco_judge_tokens_total", phase="union", kind="cached_input") == 10
    assert value(series, "ray_draco_judge_dollars_total", phase="credit") == pytest.approx(0.25)
    assert value(series, "ray_draco_rollout_seconds_count") == 2
    assert value(series, "ray_draco_kl", run="watched") == 0.25
    assert value(series, "ray_draco_rollouts_waiting") == 3
    assert value(series, "ray_draco_rollouts_in_flight") == 5
    # Of the run: what was spent before this process, and the phases of this one.
    spent = sum(value(series, "ray_draco_judge_dollars_total", phase=phase) for phase in PHASES)
    assert value(series, "ray_draco_run_dollars") == pytest.approx(10 + spent)
    assert value(series, "ray_draco_engine_requests_waiting", engine="0") == 7
    assert value(series, "ray_draco_engine_kv_cache_share", run="watched") == 0.25
    # Counts grow by what is new, however often an engine is asked.
    assert value(series, "ray_draco_engine_sampled_tokens_total", engine="0") == 700
    assert value(series, "ray_draco_engines_up") == 1
    assert value(series, "ray_draco_engine_replacements") == 1
    # A step may take an hour: what the last one said is there all the while, and nothing was counted again.
    assert seen["later"] == series

    (events,) = (run / "tensorboard").iterdir()
    written = events.read_bytes()
    assert b"reward" in written
    assert b"judge/score/dollars" in written


def test_every_log_line_says_run_step_task_and_rollout(run_directory: Path) -> None:
    @ray.remote(num_cpus=0)
    class Talker:
        def __init__(self) -> None:
            start_run_log()
            self._both = asyncio.Barrier(2)

        async def work(self, group: str, rollout: int) -> None:
            set_log_context(group, rollout)
            # Until the other call runs too, in a context of its own.
            await self._both.wait()
            logging.getLogger("draco_ray.talker").info("worked on %s", group)

    actor = Talker.options(name="Talker-0@watched").remote()  # type: ignore[attr-defined]
    ray.get([actor.work.remote("step3/t_1", 4), actor.work.remote("evaluation0/t_2", 1)])
    logging.getLogger("draco_ray.driver").warning("no task")
    logging.getLogger("elsewhere").warning("not ours")
    files = {path.name: path for path in (run_directory / "logs").iterdir()}
    assert set(files) == {"Talker-0.jsonl", "driver.jsonl"}
    talked = [json.loads(text) for text in files["Talker-0.jsonl"].read_text().splitlines()]
    assert {(entry["step"], entry["task"], entry["rollout"]) for entry in talked} == {(3, "t_1", 4), (0, "t_2", 1)}
    assert all(entry["message"].endswith(entry["task"]) for entry in talked)
    driver = [json.loads(text) for text in files["driver.jsonl"].read_text().splitlines()]
    assert driver[-1]["message"] == "no task"
    assert {"run", "step", "task", "rollout", "level", "time", "process"} <= set.intersection(
        *map(set, driver + talked)
    )
    assert all(entry["run"] == "watched" for entry in driver + talked)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", driver[-1]["time"])


def test_a_tracker_that_is_not_installed_is_one_line(run_directory: Path) -> None:
    config = DracoConfig.model_validate({"run": {"trackers": ["wandb"]}})
    with pytest.raises(ConfigError, match=r"^run.trackers names wandb, .*pip install 'draco-ray\[wandb\]'.*$"):
        RunObserver(config, run_directory)
