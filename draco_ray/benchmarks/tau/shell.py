"""The shell tool of τ-bench's agent, tried before anything is evaluated: exactly as an episode runs it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from draco_ray.benchmarks.tau.installation import RUNNER, SHELL_RETRIEVAL, Tau2
from draco_ray.benchmarks.tau.job import base_environment
from draco_ray.benchmarks.tau.tau2_runner import REFUSED
from draco_ray.config.schema import TauBenchConfig
from draco_ray.errors import ConfigError

CHECK_SECONDS = 600.0


def unreadable_paths(tau2: Tau2, out: Path | None = None) -> list[str]:
    """What the agent's shell must not read, whatever lies where: solutions, and the evaluation's own results."""
    return [*tau2.solutions, *([] if out is None else [str(out.resolve())])]


def check_shell(config: TauBenchConfig, tau2: Tau2, out: Path | None = None) -> str | None:
    """Run commands with spaces, quotes and pipes in the agent's shell, by tau2's own code in tau2's own environment.

    Args:
        out: evaluation directory that the shell must not read; None where there is none yet.
    Returns: the ``srt`` that ran them; None where the retrieval configuration has no shell.

    Raises:
        ConfigError: a command did not do what it should, or the shell can read solutions.
    """
    if config.retrieval not in SHELL_RETRIEVAL:
        return None
    with tempfile.TemporaryDirectory(prefix="draco-tau-", ignore_cleanup_errors=True) as folder:
        tmp = Path(folder)
        job = tmp / "job.json"
        job.write_text(json.dumps({"unreadable": unreadable_paths(tau2, out)}), encoding="utf-8")
        try:
            asked = subprocess.run(
                [tau2.python, "-P", str(RUNNER), "shell", str(job)],
                env=base_environment(tau2, tmp),
                cwd=tmp,
                capture_output=True,
                text=True,
                timeout=CHECK_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"retrieval {config.retrieval}: the agent's shell was not tried ({type(error).__name__}); expected an "
                f"answer within {CHECK_SECONDS:g} s; look at srt and bwrap, or set tau_bench.retrieval=bm25"
            ) from None
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        what = last if asked.returncode == REFUSED else f"its check ended with exit code {asked.returncode}: {last}"
        raise ConfigError(f"retrieval {config.retrieval}: {what}")
    return asked.stdout.strip().splitlines()[-1]
