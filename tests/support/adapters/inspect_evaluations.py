"""Evaluated rollouts of ours as logs, read by Inspect itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.runs.inspect_logs import write_logs
from draco_ray.records import Usage
from tests.support.adapters import emit
from tests.support.evaluations import a_plan, write_evaluation
from tests.support.lost_results import lost_rollout
from tests.support.small_run import small_run


def main() -> None:
    """Print what Inspect reads in the log of a run's own evaluation, and in that of a directory with a lost rollout."""
    from inspect_ai.log import convert_eval_logs, list_eval_logs, read_eval_log

    with tempfile.TemporaryDirectory() as folder:
        logs, packed = Path(folder) / "logs", Path(folder) / "packed"
        plan = a_plan(runs=1, tasks={"a_1": 1, "b_1": 2}, label="Base")
        evaluation = write_evaluation(Path(folder) / "evaluation", plan, chance=1.0)
        lost = plan.model_copy(update={"tasks": {**plan.tasks, "c_1": None}})
        directory = EvaluationDirectory(evaluation, lost)
        directory.add("starter", lost_rollout("c_1", 0, Usage(), seconds=1.0, attempts=3, error="the world is gone"))
        (evaluation / "evaluation.json").write_text(lost.model_dump_json())
        small_run(Path(folder) / "run")
        write_logs(Path(folder) / "run", logs)
        write_logs(evaluation, logs)
        convert_eval_logs(str(logs), "eval", str(packed))
        found = []
        for each in (logs, packed):
            read = {log.eval.task: log for log in (read_eval_log(info.name) for info in list_eval_logs(str(each)))}
            found.append(
                {
                    task: {
                        "accuracy": log.results.scores[0].metrics["accuracy"].value if log.results else None,
                        "samples": [
                            [
                                s.id,
                                s.epoch,
                                (s.scores or {})["success"].value,
                                len(s.messages),
                                s.error and s.error.message,
                            ]
                            for s in log.samples or ()
                        ],
                    }
                    for task, log in read.items()
                    if log.results and log.results.scores[0].name == "success"
                }
            )
        emit(found)


if __name__ == "__main__":
    main()
