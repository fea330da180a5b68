"""Print how many held-out tasks of examples/library a run solved, by kind of request, at each evaluated step.

python jobs/library_kinds.py RUN
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.evaluations import read_evaluations

TASKS = Path(__file__).parents[1] / "examples" / "library" / "tasks.jsonl"
KINDS = ("renewal", "fine", "against the rules")


def kind(task: dict[str, Any]) -> str:
    """What is asked for, or that a part of it is against the rules."""
    if task["expected"]["refuse"]:
        return "against the rules"
    return "fine" if task["asked"]["waive"] else "renewal"


def main(run: Path) -> None:
    """Print the table as Markdown."""
    kinds = {task["id"]: kind(task) for task in map(json.loads, TASKS.read_text(encoding="utf-8").splitlines())}
    print(f"| step | {' | '.join(KINDS)} |\n|{'---|' * (1 + len(KINDS))}")
    for (step, _), rollouts in read_evaluations(RunDirectory.open(run)).items():
        played = Counter(kinds[each.task_id] for each in rollouts)
        solved = Counter(kinds[each.task_id] for each in rollouts if each.success)
        print(f"| {step} | {' | '.join(f'{solved[name]} of {played[name]}' for name in KINDS)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
