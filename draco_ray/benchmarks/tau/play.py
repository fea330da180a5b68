"""The agent program that plays one τ-bench episode: it replaces itself with tau2's own process.

``agent.command`` starts ``python -m draco_ray.benchmarks.tau.play`` like any agent program (docs/any-agent.md). The job
is in the task's field ``tau2`` (`draco_ray.benchmarks.tau.environment`); keys are in environment variables only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def main() -> None:
    """Read the job and become tau2's process. Raises: SystemExit: there is no job, or a key is missing."""
    try:
        task = json.loads(Path(os.environ["DRACO_TASK_FILE"]).read_text(encoding="utf-8"))
        job = json.loads(task["fields"]["tau2"])
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"no τ-bench episode found ({error!r}); expected environment.use=tau") from None
    environment = {name: os.environ[name] for name in job["passed"] if name in os.environ} | job["variables"]
    for name, ours in job["keys"].items():
        if value := os.environ.get(ours):
            environment[name] = value
        elif name != job["judge"]["key"]:
            raise SystemExit(f"no API key found; set environment variable {ours}, and add it to agent.pass_environment")
    agent = job["agent"]["provider"]
    environment[f"{agent}_API_BASE"] = os.environ["OPENAI_BASE_URL"]
    environment[f"{agent}_API_KEY"] = os.environ["OPENAI_API_KEY"]
    job["secrets"] = [f"{agent}_API_KEY", *job["keys"]]
    file = Path(os.environ["TMPDIR"]) / "tau2_job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    os.execve(job["python"], [job["python"], "-P", job["runner"], "play", str(file)], environment)


if __name__ == "__main__":
    main()
