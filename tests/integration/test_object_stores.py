"""Runs in a real S3 server (moto's, on loopback), behind a proxy that makes it fail."""

from __future__ import annotations

import asyncio
import http.server
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gcp_storage_emulator.server as gcs
import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs
from rich.console import Console

from draco_ray.cli import main
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, StoreError
from draco_ray.judging.prompts import evidence_key
from draco_ray.judging.reply_cache import ReplyCache
from draco_ray.records import Message
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.remote import store
from draco_ray.runs.remote.location import RunLocation, fetch_run_for_reading, open_working_folder
from draco_ray.runs.remote.store import ObjectStore
from draco_ray.runs.store import RunStore
from draco_ray.training import run as run_module
from draco_ray.training.checks import task_order
from draco_ray.training.trainer import TaskOrder
from tests.support.autoscaling import free_port
from tests.support.object_store import Faults, faulty_proxy
from tests.support.small_checkpoint import small_checkpoint
from tests.support.small_run import TASKS
from tests.unit.test_remote_runs import CALLS, LARGE, SmallRun, consistent
from tests.unit.test_training_resume import write_step

PREFIX, NAME = "runs/50% of #1 ü", "a run %20"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    yield moto.get_host_and_port()[1]
    moto.stop()


@pytest.fixture
def s3(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Faults]]:
    """A bucket's URL through the proxy, and what makes that fail."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    direct = fs.S3FileSystem(
        endpoint_override=f"http://127.0.0.1:{server}", region="us-east-1", allow_bucket_creation=True
    )
    direct.create_dir("bucket")
    with faulty_proxy(server) as (port, faults):
        yield f"endpoint_override=http://127.0.0.1:{port}&region=us-east-1&scheme=http", faults


@pytest.fixture
def gs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a run in an emulator of Google's store."""
    # pyarrow holds a stream of an object open while it asks for parts of it, which stops a server of one thread.
    monkeypatch.setattr(gcs.server, "HTTPServer", http.server.ThreadingHTTPServer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    port = free_port()
    with gcs.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
        yield f"gs://anonymous@bucket/{PREFIX}/{NAME}?endpoint_override=127.0.0.1:{port}&scheme=http"


def place(options: str, name: str, local: Path) -> RunLocation:
    return RunLocation(local / name, f"s3://bucket/{PREFIX}/{name}?{options}")


@pytest.mark.parametrize("cloud", ["s3", "gs"])
def test_a_run_is_copied_and_restored_with_names_as_they_are(
    cloud: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = (
        request.getfixturevalue("gs") if cloud == "gs" else place(request.getfixturevalue("s3")[0], NAME, tmp_path).url
    )
    here, elsewhere = (RunLocation(tmp_path / name / NAME, url) for name in ("here", "elsewhere"))
    said: list[str] = []
    with open_working_folder(here, said.append, new=True) as path:
        run = SmallRun(path)
        for task in TASKS:
            run.piece(1, task)
        run.finish(1)
        (path / "weights").write_bytes(os.urandom(12 * LARGE))
    with open_working_folder(elsewhere, said.append) as path:
        assert consistent(path) == (len(TASKS), len(TASKS) * CALLS, [1])
        assert (path / "weights").read_bytes() == (here.local / "weights").read_bytes()
    assert here.url is not None
    assert consistent(fetch_run_for_reading(here.url, checkpoints=True)) == consistent(here.local)
    assert not any(name for name in ObjectStore(here.url).names("claims"))


def test_a_store_of_googles_that_nobody_answers_for_is_said_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tries for a quarter of an hour by itself, in which nothing can be said or stopped."""
    monkeypatch.setattr(store, "GOOGLE", store.GOOGLE.replace("10", "1"))
    nowhere = ObjectStore(f"gs://anonymous@bucket/run?endpoint_override=127.0.0.1:{free_port()}&scheme=http")
    with pytest.raises(StoreError, match=r"^gs://anonymous@bucket/run.*: cannot be used: .*Could not connect"):
        nowhere.retrying(0.1).names("claims")


@pytest.mark.parametrize("fault", ["503", "cut", "dropped", "slow"])
def test_a_store_that_fails_now_and_then_loses_nothing(s3: tuple[str, Faults], tmp_path: Path, fault: str) -> None:
    options, faults = s3
    here, elsewhere = (place(options, fault, tmp_path / name) for name in ("here", "elsewhere"))
    said: list[str] = []
    with open_working_folder(here, said.append, new=True) as path:
        run = SmallRun(path)
        # More in a row than the client itself tries.
        faults.orders.extend([fault] * (1 if fault == "slow" else 5))
        for task in TASKS:
            run.piece(1, task)
        run.finish(1)
    faults.orders.extend([fault, "", fault])
    with open_working_folder(elsewhere, said.append) as path:
        assert consistent(path) == (len(TASKS), len(TASKS) * CALLS, [1])
    assert not faults.orders
    assert all("\n" not in line for line in said)


@pytest.mark.deployment
def test_a_store_that_is_gone_at_the_end_loses_nothing_here(
    s3: tuple[str, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, faults = s3
    here = place(options, "down", tmp_path / "here")
    monkeypatch.setattr("draco_ray.runs.remote.location.END_SECONDS", 1.0)
    said: list[str] = []

    def work() -> None:
        with open_working_folder(here, said.append, new=True) as path:
            SmallRun(path).piece(1, TASKS[0])
            faults.down = True

    with pytest.raises(StoreError, match="all files are in .*; to continue run draco train --resume "):
        work()
    faults.down = False
    with open_working_folder(here, said.append) as path:
        assert RunDirectory.open(path).table("judge_calls").num_rows == CALLS
    assert here.url is not None
    assert RunDirectory.open(fetch_run_for_reading(here.url)).table("judge_calls").num_rows == CALLS


def test_a_training_run_is_in_the_store_goes_on_from_there_and_is_read_there(
    s3: tuple[str, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `draco train` works with it, but for what trains: the steps are written, not played."""
    steps: list[int] = []

    def checked(
        config: DracoConfig, console: Console, checks: object
    ) -> tuple[DracoConfig, dict[str, tuple[Message, ...]], TaskOrder]:
        return config, dict.fromkeys(TASKS, ()), task_order(config, TASKS)

    def played(
        config: DracoConfig, prompts: object, order: object, run: RunDirectory, start: Any, console: Any, url: str
    ) -> Path:
        step = start.step + 1
        steps.append(step)
        evidence_key(run.judge_cache)
        asyncio.run(ReplyCache(run.judge_cache).put(f"step {step}", {"text": "a reply"}))
        write_step(run, step, finished=False)
        small_checkpoint(run.checkpoint(step))
        RunStore(run).finish_step(step, {"step": step})
        if step == 1:
            # In the midst of the next one.
            write_step(run, 2, finished=False)
            raise KeyboardInterrupt
        return run.path

    monkeypatch.setattr(run_module, "_checked", checked)
    monkeypatch.setattr(run_module, "_train", played)
    root, url = f"s3://bucket/team?{s3[0]}", f"s3://bucket/team/trained?{s3[0]}"
    words = [f"run.root={root}", "run.name=trained", "train.steps=2", "train.prompts_per_step=2"]
    words.append("train.evaluate_before_after=false")

    def draco(*words: str) -> object:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return ended.value.code

    def command(machine: str, *more: str) -> object:
        return draco("train", "sandbox", *words, f"run.local={tmp_path / machine}", *more)

    assert command("one") == 130
    assert command("two", "--resume-or-start") == 0
    assert command("three", "--resume-or-start") == 0
    assert steps == [1, 2]
    said = capsys.readouterr().out
    assert "trained: continues after step 1" in said
    assert "trained: already finished at step 2" in said
    (second,) = (tmp_path / "three").glob("*/trained")
    assert RunDirectory.open(second).checkpoint_steps() == [1, 2]
    assert len(ReplyCache(second / "judge_cache")) == 2

    assert draco("runs", "show", url) == 0
    assert "2 adapters" in " ".join(capsys.readouterr().out.split())
    page, events = tmp_path / "page.html", tmp_path / "events.json"
    assert draco("runs", "cost", url) == 0
    assert draco("runs", "timeline", url, "--step", "1", "--out", str(events)) == 0
    assert draco("replay", url) == 0
    assert draco("report", url, "--out", str(page)) == 0
    assert page.stat().st_size > 10_000
    assert events.exists()


def test_a_bucket_that_is_not_there_is_one_line(s3: tuple[str, Faults], tmp_path: Path) -> None:
    missing = RunLocation(tmp_path / "run", f"s3://no-such-bucket/run?{s3[0]}")
    with (
        pytest.raises((ConfigError, StoreError), match="no-such-bucket/run") as refusal,
        open_working_folder(missing, print),
    ):
        pass
    assert "\n" not in str(refusal.value)


def test_a_driver_that_is_killed_is_gone_on_from_by_another(s3: tuple[str, Faults], tmp_path: Path) -> None:
    """SIGKILL behind a copy: another driver takes the claim of the dead process over and has what was copied."""
    here, elsewhere = (place(s3[0], "killed", tmp_path / name) for name in ("here", "elsewhere"))
    program = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from draco_ray.runs.remote import location
        from draco_ray.runs.remote.location import RunLocation, open_working_folder
        from tests.support.small_run import TASKS
        from tests.unit.test_remote_runs import SmallRun
        location.INTERVAL_SECONDS, location.SHARE = 0.01, 1.0
        with open_working_folder(RunLocation(Path({str(here.local)!r}), {here.url!r}), print, new=True) as path:
            run = SmallRun(path)
            for step in range(1, 1000):
                for task in TASKS:
                    run.piece(step, task)
                run.finish(step)
                print("step", step, flush=True)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        copies = ObjectStore(here.url or "")
        while (line := driver.stdout.readline()) != "step 1\n":
            assert line
        # The next copy may have begun before the step was done, the one behind it has not.
        for _ in range(2):
            before = copies.names("manifests")[-1:]
            while copies.names("manifests")[-1:] == before:
                assert driver.poll() is None
        driver.send_signal(signal.SIGKILL)
    with open_working_folder(elsewhere, print) as path:
        run = RunDirectory.open(path)
        assert run.table("judge_calls").num_rows > 0
        # A step whose checkpoint is there and whose end is not goes on from its parts.
        assert set(run.checkpoint_steps()) >= {line["step"] for line in run.metrics()}
