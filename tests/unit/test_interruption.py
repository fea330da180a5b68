"""SIGTERM as Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from draco_ray import cli
from draco_ray.config.load import load_config
from draco_ray.interruption import handler_kept, sigterm_as_interrupt
from draco_ray.training import run as driver
from draco_ray.training import session
from draco_ray.training.run import _stopping
from draco_ray.training.trainer import TaskOrder
from draco_ray.training.watchdog import cancel_on_loss


# A shell starts what a script runs behind it with SIGINT ignored.
@pytest.mark.parametrize("usual", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_interrupts_the_block_and_means_what_it_meant_afterwards(usual: signal.Handlers) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with handler_kept(signal.SIGINT):
        signal.signal(signal.SIGINT, usual)
        with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is usual
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_said_is_said_before_anything_is_tidied_up(capfd: pytest.CaptureFixture[str]) -> None:
    before: list[str] = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            before.append(capfd.readouterr().out)

    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt("continue with: draco train --resume runs/a"):
        work()
    assert before == ["continue with: draco train --resume runs/a\n"]


def test_a_stopped_run_with_a_copy_names_the_url_and_another_host_continues_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def stopped(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)

    tasks = [f"t_{number}" for number in range(8)]
    monkeypatch.setattr(driver, "_run", stopped)
    monkeypatch.setattr(
        driver, "_checked", lambda config, *_: (config, dict.fromkeys(tasks, ()), TaskOrder(tasks, 8, 0))
    )
    monkeypatch.setattr(driver, "_other_digests", lambda config: {})
    monkeypatch.setattr(session, "open_judge", lambda config, *_: contextlib.nullcontext(config))
    monkeypatch.setattr(session, "ray_session", lambda *_: contextlib.nullcontext())
    url = f"file://{tmp_path}/our store/first"
    config = load_config("sandbox", [f"run.root=file://{tmp_path}/our store", "run.name=first"])
    for host, begin in (
        ("one", lambda: driver.train(config)),
        ("two", lambda: driver.resume(url, trust=True)),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        with patch.dict(os.environ), pytest.raises(SystemExit):
            begin()
        said = capfd.readouterr().out.splitlines()
        assert f"stopping; continue with: draco train --resume '{url}'" in said
        assert f"continue with: draco train --resume '{url}'" in said
    assert f"restoring {url}" in said


def test_sigterm_cancels_what_runs_in_an_event_loop() -> None:
    seen = []

    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cleaned up")
            raise

    with handler_kept(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
            asyncio.run(work())
    assert seen == ["cleaned up"]


def test_a_handler_that_another_puts_in_its_place_goes() -> None:
    with sigterm_as_interrupt():
        ours = signal.getsignal(signal.SIGTERM)
        with handler_kept(signal.SIGTERM):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is ours


def test_another_thread_can_set_no_handlers_and_goes_on() -> None:
    done = []

    def run() -> None:
        with sigterm_as_interrupt(), handler_kept(signal.SIGTERM):
            done.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == [before]


def test_a_second_interrupt_ends_at_once_without_a_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    said = io.StringIO()

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        finally:
            # Ends what the run started, which takes its time.
            asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
            await asyncio.wait_for(asyncio.gather(asyncio.sleep(3600), asyncio.sleep(3600)), timeout=3600)

    async def run() -> None:
        await cancel_on_loss(work(), cancelled=partial(_stopping, Console(file=said)))

    # The loop's own handler, which stays behind then, goes with the command.
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        asyncio.run(run())
    gc.collect()
    assert said.getvalue() == "stopping…\n"
    assert "never retrieved" not in caplog.text


def test_whoever_stops_a_command_before_it_has_begun_sees_no_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typer reads the signatures of all commands first, which takes a while."""
    monkeypatch.setattr(cli, "_commands", lambda: lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        cli.main(["replay", "run"])
    assert (end.value.code, capsys.readouterr().err) == (130, "")
