"""Scripted runs in the generated world as OpenAI chat messages, the way a code agent's log has them."""

from __future__ import annotations

import json
from pathlib import Path

from draco_ray.sandbox.world.scripts import Fault
from tests.support.rule_judge_runs import instruction, scripted_run

FAMILY = "count_library_songs"
FAULTS: tuple[tuple[Fault, ...], ...] = ((), (Fault.FIRST_PAGE_ONLY,))


def chat_traces(path: Path, groups: int, faults: tuple[tuple[Fault, ...], ...] = FAULTS) -> Path:
    """Write ``groups`` tasks, each run once with each set of faults, which the rule judge can judge."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(groups):
            for rollout, each in enumerate(faults):
                said = [
                    {"role": "system", "content": f"Number {number}. Write code between <code> and </code>."},
                    {"role": "user", "content": instruction(FAMILY)},
                ]
                for step in scripted_run(FAMILY, *each).steps:
                    said.append({"role": "assistant", "content": f"<code>\n{step.code}\n</code>"})
                    said.append({"role": "user", "content": step.output or ""})
                record = {"id": f"{number}/{rollout}", "task_id": f"task {number}", "messages": said}
                file.write(json.dumps(record) + "\n")
    return path
