"""A run of ours as logs, read by Inspect itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

from draco_ray.lab.runs.inspect_logs import write_logs
from tests.support.adapters import emit
from tests.support.small_run import small_run


def main() -> None:
    """Print what Inspect reads in the logs, before and after it packs them."""
    from inspect_ai.log import convert_eval_logs, list_eval_logs, read_eval_log, read_eval_log_sample_summaries

    with tempfile.TemporaryDirectory() as folder:
        logs, packed = Path(folder) / "logs", Path(folder) / "packed"
        write_logs(small_run(Path(folder) / "run").path, logs)
        convert_eval_logs(str(logs), "eval", str(packed))
        found = []
        for each in (logs, packed):
            first = next(log for log in list_eval_logs(str(each)) if "_run_step000001" in log.name)
            log = read_eval_log(first.name)
            sample = (log.samples or [])[0]
            score = (sample.scores or {})["draco"]
            found.append(
                {
                    "logs": len(list_eval_logs(str(each))),
                    "status": log.status,
                    "samples": sorted([s.id, s.epoch] for s in log.samples or ()),
                    "value": score.value,
                    "verdicts": [v["verdict"] for v in (score.metadata or {})["verdicts"]],
                    "steps": [v["steps"] for v in (score.metadata or {})["verdicts"]],
                    "roles": [message.role for message in sample.messages],
                    "summaries": len(read_eval_log_sample_summaries(first.name)),
                    "mean": log.results.scores[0].metrics["mean"].value if log.results else None,
                }
            )
        emit(found)


if __name__ == "__main__":
    main()
