"""Train every example from nothing, one after the other, and print what each gained on held-out tasks.

    make examples                     # all four: a policy from demonstrations, then DRACO
    python jobs/train_examples.py --only shop,desk
    python jobs/train_examples.py --table   # the table again, of the runs that are there

Intervals are over held-out scenarios (95 %; of the difference, paired). Minutes are of the whole target, the starter
policy included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.intervals import ClusteredMean, Interval, clustered_mean, rate_difference, rate_interval
from draco_ray.records import Evaluation
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations

NAMES = ("shop", "desk", "parcels", "hangman")
RUNS_OF_A_TASK = 2
ROOT = Path(".cache/examples")
HEADER = ("example", "held-out tasks x rollouts", "before", "after", "gain, points", "steps", "minutes")


def main() -> None:
    """Read the command line, train, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help="examples to train, separated by commas")
    parser.add_argument("--table", action="store_true", help="only print the results")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--only {','.join(unknown)}: no such example; expected some of {','.join(NAMES)}")
    if not arguments.table:
        for name in names:
            train(name, ROOT / name)
    done = [name for name in names if (ROOT / name / "run").is_dir()]
    print(table({name: cells(ROOT / name) for name in done}))
    if len(done) < len(names):
        raise SystemExit(f"not trained yet: {', '.join(sorted(set(names) - set(done)))}")


def train(name: str, folder: Path) -> None:
    """Run ``make example-NAME``; raises SystemExit where it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    overrides = f"run.root={folder.resolve()} run.name=run train.evaluation_runs={RUNS_OF_A_TASK}"
    began = time.monotonic()
    made = subprocess.run(["make", "--no-print-directory", f"example-{name}", f"ARGS={overrides}"], check=False)
    if made.returncode:
        raise SystemExit(f"make example-{name} failed with exit code {made.returncode}; see its output above")
    (folder / "seconds.json").write_text(json.dumps(time.monotonic() - began))


def cells(folder: Path) -> list[str]:
    """A row of the table, after its name.

    Raises:
        ConfigError: the run has no evaluation of held-out tasks before or after its training.
    """
    run = RunDirectory.open(folder / "run")
    measured = {step: found for (step, _), found in read_evaluations(run).items()}
    last = max(measured, default=0)
    if 0 not in measured or last == 0:
        raise ConfigError(f"{run.path}: held-out tasks were not evaluated before and after; let the run finish")
    before, after = rate(measured[0]), rate(measured[last])
    tasks = len({evaluation.task_id for evaluation in measured[last]})
    seconds = json.loads((folder / "seconds.json").read_text())
    return [
        f"{tasks} x {len(measured[last]) // tasks}",
        shown(rate_interval(before)),
        shown(rate_interval(after)),
        shown(rate_difference(after, before), sign="+"),
        str(last),
        f"{seconds / 60:.1f}",
    ]


def rate(evaluations: Sequence[Evaluation]) -> ClusteredMean:
    """The share of successful rollouts (lost ones count as failures), clustered by scenario."""
    successes: dict[str, list[bool]] = defaultdict(list)
    for evaluation in evaluations:
        successes[evaluation.task_id].append(evaluation.success)
    # In an environment without scenarios, each task is its own scenario.
    scenario = {evaluation.task_id: evaluation.scenario or evaluation.task_id for evaluation in evaluations}
    means = {task: sum(found) / len(found) for task, found in successes.items()}
    return clustered_mean([means], scenario.__getitem__, trials=len(evaluations))


def shown(interval: Interval, sign: str = "") -> str:
    """A rate and its interval, in percent."""
    mean, low, high = (f"{100 * value:{sign}.1f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def table(rows: Mapping[str, Sequence[str]]) -> str:
    """The table as Markdown."""
    lines = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *((name, *row) for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
