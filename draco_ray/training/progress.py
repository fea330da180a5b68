"""What a person sees while a run goes on: a live bar within a step, one line after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draco_ray.judging.outage import Pause, span
from draco_ray.pipeline import Group

LOOK_SECONDS = 1.0
"""Between two looks at whether the judge is there."""


class StepProgress:
    """A bar over the step's rollouts and the judge phases and groups done; silent where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rollouts · {task.fields[judged]} judge phases"),
            TextColumn("· {task.fields[ready]}/{task.fields[groups]} groups"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._groups: dict[str, Group] = {}
        self._task: Any = None

    def start(self, title: str, groups: int, rollouts: int) -> None:
        """Begin a step."""
        self._groups = {}
        self._progress.start()
        self._task = self._progress.add_task(title, total=rollouts, judged=0, ready=0, groups=groups, note="")

    def update(self, group: Group) -> None:
        """Take in a group's news."""
        self._groups[group.name] = group
        if self._task is None:
            return
        known = self._groups.values()
        self._progress.update(
            self._task,
            completed=sum(len(each.rollouts) for each in known),
            judged=sum(len(each.phases) for each in known),
            ready=sum(each.advantage is not None or each.reason is not None for each in known),
        )

    def advance(self) -> None:
        """One more rollout that belongs to no group."""
        if self._task is not None:
            self._progress.advance(self._task)

    def note(self, text: str) -> None:
        """Say something at the bar's end; empty: nothing any more."""
        if self._task is not None:
            self._progress.update(self._task, note=text)

    def stop(self) -> None:
        """End the step's bar."""
        # Cleared first: after an interrupt between any two lines this runs a second time.
        task, self._task = self._task, None
        if task is not None:
            self._progress.remove_task(task)
        self._progress.stop()


async def watch_judge(
    pause: Callable[[], Awaitable[Pause | None]],
    progress: StepProgress,
    console: Console,
    seconds: float = LOOK_SECONDS,
) -> None:
    """Say, until cancelled, that judging is paused and that it goes on: a line each, and a countdown at the bar's end.

    Args:
        pause: the outage there is, if there is one.
        progress: where the countdown stands.
        console: where the lines go.
        seconds: between two looks.
    """
    shown = False
    while True:
        found = await pause()
        if found is not None:
            countdown = f"next try in {found.next_try:.0f} s, the run stops in {span(found.gives_up)}"
            progress.note(f"· judge away: {countdown}")
            if not shown:
                console.print(f"the judge answers nobody ({found.reason}): judging is paused; {countdown}")
        elif shown:
            progress.note("")
            console.print("the judge answers again: judging goes on")
        shown = found is not None
        await asyncio.sleep(seconds)


def step_line(metrics: Mapping[str, Any], steps: int) -> str:
    """A step in one line; keys in a fixed order, named as in metrics.jsonl."""
    ended = " ".join(f"{mode} {count}" for mode, count in metrics["ended"].items() if count)
    parts = [
        f"step {metrics['step']}/{steps} {metrics['seconds']:.0f}s",
        f"reward {_number(metrics['reward'], '+.2f')}",
        f"pass_rate {_number(metrics['pass_rate'], '.0%')}",
        f"signal {metrics['groups_with_signal']}/{metrics['groups']} groups",
        f"ended: {ended or 'none'}",
        f"judge ${metrics['judge_dollars']:.2f}, {metrics['judge_failed_phases']} failed",
        f"generation {metrics['seconds_generation']:.0f}s judging {metrics['seconds_judging']:.0f}s "
        f"({_number(metrics['judge_hidden_share'], '.0%')} hidden) learning {metrics['seconds_learning']:.0f}s "
        f"sync {metrics['seconds_sync']:.1f}s",
        f"kl {_number(metrics['kl'], '.4f')} grad {_number(metrics['grad_norm'], '.2f')} "
        f"gap {_number(metrics['canary_gap'], '.4f')}",
    ]
    if metrics.get("tgc") is not None:
        parts.insert(1, f"tgc {metrics['tgc']:.1%}")
    if metrics.get("judge_prompts_cut"):
        parts.append(f"{metrics['judge_prompts_cut']} judge prompts cut to its context")
    if metrics["rollouts_lost"] or metrics["groups_failed"]:
        parts.append(f"lost {metrics['rollouts_lost']} rollouts, {metrics['groups_failed']} groups")
    return " | ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
