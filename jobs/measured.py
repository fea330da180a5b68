"""Sandbox runs behind the jobs' tables; the results of each run are one small file.

The work can be split over nights and machines: files in the folder with figures that were measured earlier or elsewhere
count as runs, and only missing runs are made. All runs of a seed start from the same starter policy, which differs
between kinds of CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig, Price
from draco_ray.judging.pricing import reply_cost
from draco_ray.lab.runs.cost import read_calls
from draco_ray.records import LOST_ROLLOUT, EpisodeEnd, Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations
from draco_ray.runs.rows import Row

SANDBOX = "sandbox"
REFERENCE_JUDGE = "gpt-5.4"
"""The rule judge costs nothing: its tokens are priced as those of the paper's judge."""
CellT = TypeVar("CellT")
"""Key of a run in a table, with its seed."""


@dataclass(frozen=True)
class Spend:
    """Tokens and dollars of a run's judge up to a step."""

    tokens: int = 0
    dollars: float = 0.0

    def __add__(self, other: Spend) -> Spend:
        return Spend(self.tokens + other.tokens, self.dollars + other.dollars)


@dataclass(frozen=True)
class Measured:
    """A run on held-out tasks, by training step; 0 is the untrained policy."""

    evaluations: Mapping[int, Sequence[Evaluation]]
    spent: Mapping[int, Spend]
    """Evaluated step -> spend up to its end."""
    policy: str
    """Start of the SHA-256 of the weights that it started from, which differ between kinds of CPU."""

    @property
    def last(self) -> int:
        """Its last evaluated step."""
        return max(self.evaluations)

    def within(self, dollars: float) -> int:
        """The last evaluated step by which the run had spent at most ``dollars``."""
        return max(step for step in self.evaluations if self.spent[step].dollars <= dollars)


def measure(run: RunDirectory, evaluations: Mapping[int, Sequence[Evaluation]]) -> Measured:
    """A run's evaluated steps, and what the judge had cost by then at reference prices."""
    price = DracoConfig().judge.prices[REFERENCE_JUDGE]
    by_step = {step: _spend(calls, price) for step, calls in read_calls(run).items()}
    spent = {step: sum((by_step[past] for past in by_step if past <= step), start=Spend()) for step in evaluations}
    return Measured(evaluations=evaluations, spent=spent, policy=policy_of(Path(str(run.setting("model.path")))))


def of_preset(preset: str) -> str:
    """What a preset adds to a name: a sandbox's variety, or the folder of a configuration's file.

    >>> of_preset("sandbox-hard"), of_preset("examples/library/environment.yaml")
    ('-hard', '-library')
    """
    path = Path(preset)
    return f"-{path.resolve().parent.name}" if path.suffix else preset.removeprefix(SANDBOX)


def policy_of(model: Path) -> str:
    """See `Measured.policy`; a model of several files or of a hub goes by its name."""
    weights = model / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16] if weights.is_file() else str(model)


def of_one_policy(found: Iterable[tuple[int, Measured]], waiting: Iterable[Wanted]) -> list[Wanted]:
    """The runs of ``waiting`` that can be made here, so that all runs of a seed begin from one policy.

    Comparisons are within a seed; another seed may start from another policy, made on another machine. A seed whose
    runs start from a policy that this machine does not have is left out, with a message; a seed with runs from two
    policies ends the program.

    Args:
        found: seed and what is known of a run of it.
        waiting: runs that are missing.
    """
    policies: dict[int, str] = {}
    for seed, measured in found:
        if policies.setdefault(seed, measured.policy) != measured.policy:
            sys.exit(
                f"seed {seed}: its runs start from 2 policies ({measured.policy}, {policies[seed]}), but can be "
                "compared only if they start from the same; use a separate folder (--measured) for each policy"
            )
    waiting = list(waiting)
    begins = {(wanted.preset, wanted.overrides) for wanted in waiting}
    starters = {each: Path(load_config(each[0], each[1]).model.path) for each in begins}
    here = {each: policy_of(starter) for each, starter in starters.items()}
    possible = []
    for wanted in waiting:
        mine = here[wanted.preset, wanted.overrides]
        if policies.get(wanted.seed, mine) == mine:
            possible.append(wanted)
    if len(possible) < len(waiting) and (absent := [path for path in starters.values() if not path.is_dir()]):
        sys.exit(
            f"{absent[0]}: the starter policy of these runs does not exist; build it with `make world`, or the one of "
            "examples/library with `make demo-real`"
        )
    for seed in sorted({wanted.seed for wanted in waiting} - {wanted.seed for wanted in possible}):
        print(
            f"seed {seed}: its runs start from policy {policies[seed]}, which this machine does not have; missing "
            "runs are left to a machine that has it",
            file=sys.stderr,
        )
    return possible


def _spend(calls: Sequence[Row], price: Price) -> Spend:
    # Replies from the cache cost nothing.
    calls = [call for call in calls if call["requests"]]
    tokens_in = sum(call["input_tokens"] for call in calls)
    cached = sum(call["cached_tokens"] for call in calls)
    tokens_out = sum(call["output_tokens"] for call in calls)
    return Spend(tokens_in + tokens_out, reply_cost(price, tokens_in, cached, tokens_out))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A run that a table needs."""

    preset: str
    setting: str
    seed: int
    steps: int
    every: int | None
    """Held-out tasks are played before training, after every so many steps (None: none) and after the last one."""
    runs_per_task: int
    overrides: tuple[str, ...] = ()
    """Further overrides of ``draco train``."""
    label: str = ""
    """Label of the overrides in the run's name."""

    @property
    def name(self) -> str:
        """Name of its folder and its file.

        >>> Wanted(preset="sandbox-hard", setting="draco", seed=1, steps=6, every=2, runs_per_task=3).name
        'draco-hard-seed1-steps6'
        """
        return f"{self.setting}{of_preset(self.preset)}{self.label}-seed{self.seed}-steps{self.steps}"

    @property
    def words(self) -> list[str]:
        """``KEY=VALUE`` overrides, without the run's location."""
        curve = [] if self.every is None else [f"train.evaluate_every={self.every}"]
        measured = ["train.evaluate_before_after=true", *curve, f"train.evaluation_runs={self.runs_per_task}"]
        return [f"seed={self.seed}", f"train.steps={self.steps}", *measured, *self.overrides]

    def known(self, folder: Path) -> Measured | None:
        """Its measurements, from its file in ``folder``; None if there is no file."""
        return read(folder / f"{self.name}.jsonl", self.words)

    def make(self, root: Path, folder: Path) -> Measured:
        """Train and measure it, or continue where it was stopped; a failure ends the program with a message."""
        where = [f"run.root={root}", f"run.name={self.name}"]
        command = ["train", self.preset, "--setting", self.setting, *self.words, *where]
        if (root / self.name / "config.yaml").is_file():
            command += ["--resume", str(root / self.name)]
        print(f"draco {' '.join(command)}", file=sys.stderr, flush=True)
        if code := wait_for([sys.executable, "-m", "draco_ray.cli", *command]):
            sys.exit(f"{self.name} failed with exit code {code}; run the job again to continue")
        run = RunDirectory.open(root / self.name)
        measured = measure(run, {step: found for (step, _), found in read_evaluations(run).items()})
        write(folder / f"{self.name}.jsonl", self.words, measured)
        return measured


def run_all(
    cells: Mapping[CellT, Wanted],
    root: Path,
    folder: Path,
    show: Callable[[dict[CellT, Measured]], None],
    *,
    print_only: bool,
    made: Callable[[Wanted], None] = lambda run: None,
) -> None:
    """Show what is in ``folder``; make the missing runs in ``root``, in order, and show all again after each.

    Cells with equal runs share one. ``made`` is called with each run that was made, before it is shown.
    """
    found = {cell: known for cell, run in cells.items() if (known := run.known(folder)) is not None}
    missing = {} if print_only else {cell: run for cell, run in cells.items() if cell not in found}
    possible = of_one_policy([(cells[cell].seed, known) for cell, known in found.items()], missing.values())
    folder.mkdir(parents=True, exist_ok=True)
    show(found)
    for cell, run in missing.items():
        if run in possible:
            if (known := run.known(folder)) is None:
                known = run.make(root, folder)
                made(run)
            found[cell] = known
            show(found)


def wait_for(command: Sequence[str]) -> int:
    """Run a command, pass a SIGTERM on to it, and return its exit code: a run must not outlive its job."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def default_steps(preset: str) -> int:
    """Training steps of a preset."""
    steps = load_config(preset).train.steps
    assert steps is not None, f"{preset} sets epochs instead of steps"
    return steps


def write(path: Path, words: Sequence[str], measured: Measured) -> None:
    """Write measurements: a line with the arguments and the machine, then a line per evaluated step and per task."""
    lines: list[dict[str, Any]] = [
        {
            "words": list(words),
            "date": datetime.now(UTC).date().isoformat(),
            "version": metadata.version("draco-ray"),
            "policy": measured.policy,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        }
    ]
    for step, found in measured.evaluations.items():
        spent = measured.spent[step]
        lines.append({"step": step, "judge_tokens": spent.tokens, "judge_dollars": round(spent.dollars, 6)})
        for task_id in dict.fromkeys(each.task_id for each in found):
            rollouts = sorted((each for each in found if each.task_id == task_id), key=lambda each: each.run)
            lines.append(
                {
                    "task": task_id,
                    "scenario": rollouts[0].scenario,
                    "success": [int(each.success) for each in rollouts],
                    "turns": [each.turns for each in rollouts],
                    "lost": [each.run for each in rollouts if each.lost],
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".begun")
    begun.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    # Write atomically: an existing file means a finished run.
    begun.replace(path)


def read(path: Path, words: Sequence[str]) -> Measured | None:
    """The measurements for these arguments; None if there is no such file.

    A file with a learning curve also serves if none is requested, so the noise bench can use the ablation's runs. A
    file that is damaged, or was measured with other arguments, ends the program with a message.
    """
    if not path.is_file():
        return None
    evaluations: dict[int, list[Evaluation]] = {}
    spent: dict[int, Spend] = {}
    try:
        made, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        asked, policy = made["words"], made["policy"]
        for line in lines:
            if "step" in line:
                spent[step := line["step"]] = Spend(line["judge_tokens"], line["judge_dollars"])
                evaluations[step] = []
            else:
                evaluations[step] += _rollouts(line)
    except (ValueError, KeyError, TypeError, NameError) as error:
        sys.exit(f"{path}: damaged ({error}); remove it to run it again")
    if [word for word in asked if word in words or not word.startswith("train.evaluate_every=")] != list(words):
        sys.exit(
            f"{path}: measured with arguments {asked}, expected {list(words)}; remove the file, or choose another "
            "folder"
        )
    return Measured(evaluations=evaluations, spent=spent, policy=policy)


def _rollouts(line: Mapping[str, Any]) -> list[Evaluation]:
    return [
        Evaluation(
            task_id=line["task"],
            scenario=line["scenario"],
            run=run,
            success=bool(success),
            passed_tests=success,
            total_tests=1,
            turns=turns,
            ended=EpisodeEnd.UNSTATED,
            failures=(LOST_ROLLOUT,) if run in line["lost"] else (),
        )
        for run, (success, turns) in enumerate(zip(line["success"], line["turns"], strict=True))
    ]
