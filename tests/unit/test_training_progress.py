"""What a person is told while the judge is away."""

from __future__ import annotations

import asyncio
import io

from rich.console import Console

from draco_ray.judging.outage import Pause
from draco_ray.training.progress import StepProgress, watch_judge


def away(next_try: float, gives_up: float) -> Pause:
    return Pause(reason="503 overloaded", lasted=10.0, next_try=next_try, gives_up=gives_up)


async def test_an_outage_is_a_line_a_countdown_and_another_line() -> None:
    looks = [None, away(4, 3590), away(3, 3589), away(2, 3588), None, None]
    over = asyncio.Event()
    notes: list[str] = []

    class Noted(StepProgress):
        def note(self, text: str) -> None:
            super().note(text)
            notes.append(text)

    async def pause() -> Pause | None:
        if not looks:
            over.set()
            return None
        return looks.pop(0)

    text = io.StringIO()
    console = Console(file=text, width=200)
    progress = Noted(console)
    progress.start("step 1/2", 1, 6)
    watching = asyncio.create_task(watch_judge(pause, progress, console, 0.0))
    await over.wait()
    watching.cancel()
    progress.stop()
    lines = text.getvalue().splitlines()
    assert lines == [
        "the judge answers nobody (503 overloaded): judging is paused; next try in 4 s, the run stops in 59 min 50 s",
        "the judge answers again: judging goes on",
    ]
    assert notes == [
        "· judge away: next try in 4 s, the run stops in 59 min 50 s",
        "· judge away: next try in 3 s, the run stops in 59 min 49 s",
        "· judge away: next try in 2 s, the run stops in 59 min 48 s",
        "",
    ]
