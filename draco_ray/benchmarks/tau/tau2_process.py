"""Find and check the tau2-bench installation; build parts of its jobs and of its processes' environment."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from draco_ray.benchmarks.tau.config import DenseRetrieval, TauBenchConfig, TauModelConfig
from draco_ray.config.schema import provider_key
from draco_ray.errors import ConfigError
from draco_ray.judging.tokens import refused_parameters

log = logging.getLogger(__name__)

RUNNER_SCRIPT = Path(__file__).with_name("tau2_runner.py")
PYTHON_VARIABLE, HOME_VARIABLE = "TAU2_PYTHON", "TAU2_HOME"
BANKING = "banking_knowledge"
DOMAINS_FOLDER = Path("data/tau2/domains")
"""Folder of the domains in a checkout."""
TASKS_FOLDER = DOMAINS_FOLDER / BANKING / "tasks"
FULL_SPLIT = 97
TESTED_COMMIT = "a2c0247"
"""Commit of tau2-bench 1.0.1 that docs/tau_bench.md describes."""
CHECK_SECONDS = 300.0
SHELL_RETRIEVAL = ("alltools-qwen", "terminal_use")
DENSE_RETRIEVAL = get_args(DenseRetrieval)
SHELL_PROGRAMS = ("srt", "rg", "bwrap", "socat") if sys.platform.startswith("linux") else ("srt", "rg")
JUDGE_KEY = "DRACO_TAU_JUDGE_KEY"
PROVIDER_VARIABLES = {"openai": "OPENAI", "hosted_vllm": "HOSTED_VLLM"}
"""Providers whose endpoint LiteLLM reads from <NAME>_API_BASE and <NAME>_API_KEY."""
PASSED_ON = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""The only variables that tau2's process inherits; others could set another endpoint or key."""
_INSTALL = "install tau2-bench as described in its README (docs/tau_bench.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tau2:
    """A checked installation of tau2-bench."""

    python: str
    home: Path
    version: str
    commit: str
    """Commit of the checkout; ``unknown`` if it is no git repository."""
    tasks: tuple[str, ...]
    """Ids of the banking domain's tasks."""

    @property
    def secret_paths(self) -> list[str]:
        """Paths that the agent's shell must not read: tasks with solutions, git history, keys."""
        return [str(path) for name in ("data", ".git", ".env") if (path := self.home / name).exists()]


def find_tau2(config: TauBenchConfig) -> Tau2:
    """Find tau2-bench and check its version, tasks and programs; takes seconds.

    Raises:
        ConfigError: tau2-bench is missing, has another version, is another package of that name, or lacks its data or
            the programs that its shell tool needs.
    """
    home = find_home(config.tau2_home, TASKS_FOLDER)
    python = find_python(config.tau2_python, home)
    tasks = tuple(sorted(path.stem for path in (home / TASKS_FOLDER).glob("task_*.json")))
    if len(tasks) != FULL_SPLIT:
        raise ConfigError(
            f"tau2_home {home}: {len(tasks)} tasks in {TASKS_FOLDER}; expected the {FULL_SPLIT} of tau2-bench "
            f"{config.tau2_version}; check out that version"
        )
    check_package(python, config.tau2_version)
    absent = [program for program in SHELL_PROGRAMS if shutil.which(program) is None]
    if absent and config.retrieval in SHELL_RETRIEVAL:
        raise ConfigError(
            f"retrieval {config.retrieval}: {', '.join(absent)} not on PATH; its shell tool needs "
            f"{', '.join(SHELL_PROGRAMS)}; install them, or set tau_bench.retrieval=bm25"
        )
    commit = "unknown"
    if (home / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(home), "rev-parse", "--verify", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or commit
    if not commit.startswith(TESTED_COMMIT):
        log.warning("tau2_home %s is at commit %s; this version was tested with %s", home, commit, TESTED_COMMIT)
    return Tau2(python=python, home=home, version=config.tau2_version, commit=commit, tasks=tasks)


def find_home(configured: Path | None, needed: Path) -> Path:
    """Find the checkout. Raises: ConfigError: there is none, or it lacks the folder ``needed``."""
    named = configured or os.environ.get(HOME_VARIABLE)
    if not named:
        raise ConfigError(f"tau2_home is not set; expected a checkout of tau2-bench; {_INSTALL}, set {HOME_VARIABLE}")
    home = Path(named).expanduser().resolve()
    if not (home / needed).is_dir():
        raise ConfigError(f"tau2_home {home}: {needed} does not exist; expected a checkout of tau2-bench; {_INSTALL}")
    return home


def find_python(configured: str | None, home: Path) -> str:
    """Find the Python of tau2-bench's environment. Raises: ConfigError: there is none."""
    named = configured or os.environ.get(PYTHON_VARIABLE) or str(home / ".venv" / "bin" / "python")
    if not os.access(named, os.X_OK) or Path(named).is_dir():
        raise ConfigError(
            f"tau2_python {named}: not an executable file; expected the Python of tau2-bench's own environment; "
            f"{_INSTALL}, set {PYTHON_VARIABLE}"
        )
    # Do not resolve the link: Python finds a virtual environment by the path of its `python` link.
    return os.path.abspath(named)


def check_package(python: str, version: str, home: Path | None = None, domain: str | None = None) -> dict[str, Any]:
    """Check the tau2 that ``python`` imports; takes seconds.

    Returns: the runner's report, with the policy and the tools of ``domain`` in the checkout ``home``, if given.

    Raises: ConfigError: Python is too old, or has no tau2-bench, another version, or another package of that name.
    """
    environment = {"PATH": os.environ.get("PATH", ""), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    try:
        done = subprocess.run(
            [python, "-P", str(RUNNER_SCRIPT), "check", *([domain] if domain else [])],
            env=environment | ({} if home is None else {"TAU2_DATA_DIR": str(home / "data")}),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise ConfigError(
            f"tau2_python {python}: does not run ({type(error).__name__}); expected Python 3.12 or later; {_INSTALL}"
        ) from None
    if found["version"] is None:
        problem = f"has no tau2 and is Python {found['python']}; tau2-bench needs 3.12 or later; {_INSTALL}"
    elif found["error"] is not None:
        problem = (
            f"tau2 {found['version']} is not tau2-bench or is incomplete ({found['error']}); the package index's "
            f"'tau2' is a physics program; {_INSTALL}"
        )
    elif found["version"] != version:
        problem = (
            f"tau2 {found['version']}; expected {version}, because grading changed between versions; install that "
            "version, or set tau2_version"
        )
    else:
        return found
    raise ConfigError(f"tau2_python {python}: {problem}")


def key_variable(config: TauModelConfig, model: str | None = None) -> str:
    """The environment variable with a model's key; ``model`` is its LiteLLM name, None the configured one."""
    return config.api_key_env or provider_key(model or config.model)


def tau2_base_env_vars(home: Path) -> dict[str, str]:
    """Environment variables of every tau2 process: set the data folder, and keep imports off .env and the network."""
    return {
        "TAU2_DATA_DIR": str(home / "data"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHON_DOTENV_DISABLED": "1",
        "PYTHONUNBUFFERED": "1",
    }


def litellm_variables(name: str, config: TauModelConfig, model: str, key: str) -> dict[str, str]:
    """Environment variables from which LiteLLM reads the key (the first) and the endpoint of a model.

    Args:
        name: dotted name of ``config``, for messages.
        config: contains the endpoint.
        model: LiteLLM name.
        key: value of the key's variable.

    Raises:
        ConfigError: the provider's endpoint cannot be set.
    """
    provider = model.partition("/")[0]
    if prefix := PROVIDER_VARIABLES.get(provider):
        return {f"{prefix}_API_KEY": key, f"{prefix}_API_BASE": config.api_base or ""}
    if config.api_base:
        raise ConfigError(
            f"{name}.api_base: cannot be set for provider {provider!r}; expected one of "
            f"{', '.join(PROVIDER_VARIABLES)} in {name}.model"
        )
    return {key_variable(config, model): key}


def judge_job(config: TauModelConfig) -> dict[str, Any]:
    """Build the job entry of the judge of natural-language assertions."""
    return {"model": config.model, "api_base": config.api_base, "args": sampling_arguments(config), "key": JUDGE_KEY}


def sampling_arguments(config: TauModelConfig, model: str | None = None) -> dict[str, Any]:
    """Sampling arguments of a model, without a temperature that the model rejects: tau2 would silently drop it.

    Args:
        config: endpoint and temperature.
        model: LiteLLM name; None: the configured one.
    """
    sent = {} if config.temperature is None else {"temperature": config.temperature}
    return {} if refused_parameters(model or config.model, config.api_base, **sent) else sent
