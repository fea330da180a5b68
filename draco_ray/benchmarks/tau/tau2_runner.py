"""The program that runs under tau2's own Python: it patches tau2, then runs a job's episodes. Imports no draco_ray.

    python -P tau2_runner.py check [DOMAIN]    print one line of JSON about the installed tau2, and about a domain
    python -P tau2_runner.py run JOB.json      run the job's episodes that have no result yet
    python -P tau2_runner.py play JOB.json     play one training episode, the policy behind its endpoint

Keys are read from environment variables that the job names, and passed to API clients only. If a part of tau2 that
must be patched is missing, nothing is run, because the leak that the patch closes would remain open.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import types
from importlib import metadata
from pathlib import Path
from typing import Any

EXIT_REFUSED = 3
"""Exit code if nothing was run; the last line on stderr says why."""
PLAY_AGAIN = 75
"""Exit code of an episode whose failure is not the policy's: EX_TEMPFAIL of sysexits.h."""
SHELL_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""The only environment variables that the agent's shell sees."""
EMBEDDER = "qwen3-embedding-8b"
"""tau2's name of the embedder of alltools-qwen."""
EVALUATOR = "evaluator.evaluator_nl_assertions"
_PR_SET_DUMPABLE = 4


class RunnerExit(Exception):
    """Ends the program with an exit code and a one-line reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(" ".join(reason.split()))
        self.code = code


def one_line(error: Exception) -> str:
    """Type and message of an error, at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check(domain: str | None = None) -> dict[str, Any]:
    """Report which package this Python imports as tau2, and the policy and tools of a domain."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "version": None, "error": None}
    try:
        found["version"] = metadata.version("tau2")
        importlib.import_module("tau2.runner")
    except ImportError as error:
        return {**found, "error": one_line(error)}
    if domain is not None:
        found["domain"] = describe(domain)
    return found


def describe(domain: str) -> dict[str, Any]:
    """A domain's agent policy, and the tools of agent and customers as JSON schemas; or an ``error``."""
    try:
        environment = importlib.import_module("tau2.runner.build").build_environment(domain)
        found = {"policy": environment.get_policy(), "tools": [tool.openai_schema for tool in environment.get_tools()]}
    except Exception as error:
        return {"error": one_line(error)}
    try:
        found["user_tools"] = [tool.openai_schema for tool in environment.get_user_tools()]
    except Exception:
        # tau2 raises if a domain's customers have no tools.
        found["user_tools"] = []
    return found


def import_tau2_modules(*names: str) -> list[Any]:
    """Import modules of tau2; discards the environment variables that tau2 sets from a .env file on import.

    Raises: RunnerExit: one cannot be imported.
    """
    before = dict(os.environ)
    try:
        return [importlib.import_module(f"tau2.{name}") for name in names]
    except ImportError as error:
        raise RunnerExit(EXIT_REFUSED, f"{error}; expected tau2-bench 1.0.1 with its extras") from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def require_attribute(owner: Any, name: str) -> Any:
    """An attribute of a module or a class of tau2. Raises: RunnerExit: it is missing."""
    if not hasattr(owner, name):
        raise RunnerExit(EXIT_REFUSED, f"{owner.__name__}.{name} does not exist; expected tau2-bench 1.0.1")
    return getattr(owner, name)


def patch(owner: Any, **values: Any) -> None:
    """Replace attributes of a module or a class of tau2. Raises: RunnerExit: one is missing."""
    for name, value in values.items():
        require_attribute(owner, name)
        setattr(owner, name, value)


def use_judge(evaluator: Any, judge: dict[str, Any], calls: Path) -> None:
    """Set the judge of natural-language assertions, and append the tokens of every call to ``calls``."""
    generate = require_attribute(evaluator, "generate")
    lock = threading.Lock()

    def counted(*args: Any, **kwargs: Any) -> Any:
        message = generate(*args, **kwargs)
        with lock, calls.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"usage": message.usage}) + "\n")
        return message

    endpoint = {"api_base": judge["api_base"]} if judge["api_base"] else {}
    arguments = {**judge["args"], **endpoint, "api_key": os.environ[judge["key"]]}
    patch(
        evaluator,
        DEFAULT_LLM_NL_ASSERTIONS=judge["model"],
        DEFAULT_LLM_NL_ASSERTIONS_ARGS=arguments,
        generate=counted,
    )


def use_embedder(module: Any, cache: Any, job: dict[str, Any]) -> None:
    """Set the embedder's endpoint and name, and the folder of cached embeddings."""
    embedder = job["embedder"]
    known = require_attribute(require_attribute(module, "OpenRouterEmbedder"), "SUPPORTED_MODELS")
    if "api_string" not in known.get(EMBEDDER, ()):
        raise RunnerExit(EXIT_REFUSED, f"OpenRouterEmbedder does not support {EMBEDDER}; expected tau2-bench 1.0.1")
    known[EMBEDDER]["api_string"] = embedder["model"]
    client = require_attribute(module, "OpenAI")
    endpoint = {"base_url": embedder["api_base"], "api_key": os.environ.get(embedder["key"], "")}
    patch(module, OpenAI=lambda **arguments: client(**{**arguments, **endpoint}))
    patch(cache, _global_cache=cache.EmbeddingsCache(job["embeddings_cache"]))


def confine_shell(module: Any, unreadable: list[str]) -> None:
    """Hide keys and files with solutions from the agent's shell.

    tau2's sandbox only blocks paths listed in its settings, and passes on every environment variable.
    """
    sandbox = require_attribute(module, "SandboxManager")
    create = require_attribute(sandbox, "_create_srt_settings")

    def settings(manager: Any) -> None:
        create(manager)
        file = Path(manager.settings_path)
        content = json.loads(file.read_text(encoding="utf-8"))
        content["filesystem"]["denyRead"] += unreadable
        file.write_text(json.dumps(content, indent=2), encoding="utf-8")

    def run(*args: Any, **kwargs: Any) -> Any:
        kept = {name: os.environ[name] for name in SHELL_VARIABLES if name in os.environ}
        return subprocess.run(*args, **{**kwargs, "env": kept})

    patch(sandbox, _create_srt_settings=settings)
    # Patch only this module: the rest of the process keeps the real `subprocess`.
    names = {"TimeoutExpired": subprocess.TimeoutExpired, "CalledProcessError": subprocess.CalledProcessError}
    patch(module, subprocess=types.SimpleNamespace(run=run, **names))


def hide_environment() -> None:
    """Keep other processes of this user from reading this one's environment in /proc (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def episode_settings(job: dict[str, Any]) -> dict[str, Any]:
    """The arguments of tau2's TextRunConfig that evaluation and training share."""
    agent, user = job["agent"], job["user"]
    models = {
        "llm_agent": agent["model"],
        "llm_args_agent": agent["args"],
        "llm_user": user["model"],
        "llm_args_user": user["args"],
    }
    return {**models, **{name: job[name] for name in ("domain", "max_steps", "seed")}}


def run(job: dict[str, Any]) -> None:
    """Run the episodes that are not in the job's result folder yet. Raises: RunnerExit: a part of tau2 is missing."""
    simulation, helpers, batch, evaluator, embedder, cache, sandbox = import_tau2_modules(
        *("data_model.simulation", "runner.helpers", "runner.batch", EVALUATOR),
        *("knowledge.embedders.openrouter_embedder", "knowledge.embeddings_cache", "knowledge.sandbox_manager"),
    )
    use_judge(evaluator, job["judge"], Path(job["judge_calls"]))
    use_embedder(embedder, cache, job)
    confine_shell(sandbox, job["unreadable"])
    config = simulation.TextRunConfig(
        **episode_settings(job),
        retrieval_config=job["retrieval"],
        num_trials=job["trials"],
        max_concurrency=job["concurrency"],
        max_retries=job["episode_retries"],
        timeout=job["episode_timeout_seconds"],
        auto_resume=True,
        workers=0,
    )
    tasks = helpers.get_tasks(job["domain"], task_ids=job["tasks"])
    batch.run_tasks(config, tasks, save_path=Path(job["results"]), results_format="dir", console_display=False)


def play(job: dict[str, Any]) -> str:
    """Play one episode with tau2's own orchestrator, agent and user simulator, and write tau2's result file.

    The episode is scored only if the job sets ``evaluate``; otherwise the evaluation criteria are removed first.

    Args:
        job: see `draco_ray.benchmarks.tau.environment.TauEnvironment.job`.

    Returns: how the episode ended.
    Raises: RunnerExit: the episode must be repeated, or the policy did something after which tau2 cannot continue.
    """
    simulations, helpers, build, progress = import_tau2_modules(
        "data_model.simulation", "runner.helpers", "runner.build", "runner.progress"
    )
    config = simulations.TextRunConfig(**episode_settings(job), num_trials=1)
    (task,) = helpers.get_tasks(job["domain"], task_ids=[job["task"]])
    if not job["evaluate"]:
        task = task.model_copy(update={"evaluation_criteria": None})
    user_errors: list[str] = []

    def once() -> Any:
        orchestrator = build.build_orchestrator(config, task, seed=job["seed"])
        watch_user(orchestrator.user, user_errors)
        simulation = orchestrator.run()
        simulation.policy = orchestrator.environment.get_policy()
        return simulation

    simulation = progress.run_with_retry(
        once, task=task, trial=0, seed=job["seed"], max_retries=0, console_display=False
    )
    failed = simulation.termination_reason == simulations.TerminationReason.INFRASTRUCTURE_ERROR
    if job["evaluate"] and not failed:
        evaluate(job, task, simulation)
    results = simulations.Results(info=helpers.get_info(config), tasks=[task], simulations=[simulation])
    results.save(Path(job["results"]))
    if user_errors:
        raise RunnerExit(PLAY_AGAIN, f"to be played again: the user simulator: {user_errors[0]}")
    if failed:
        info = simulation.info or {}
        raise RunnerExit(1, f"tau2 ended the episode: {info.get('error_type')}: {info.get('error')}")
    return f"The episode ended: {simulation.termination_reason.value}."


def watch_user(user: Any, errors: list[str]) -> None:
    """Record failures of the user simulator in ``errors``, since they are not the policy's."""
    answer = user.generate_next_message

    @functools.wraps(answer)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            message, state = answer(*args, **kwargs)
            message.validate()
        except Exception as error:
            errors.append(one_line(error))
            raise
        return message, state

    user.generate_next_message = watched


def evaluate(job: dict[str, Any], task: Any, simulation: Any) -> None:
    """Set the episode's reward; if it cannot be evaluated, store the reason in its ``info``."""
    judge = job["judge"]
    try:
        evaluator, assertions = import_tau2_modules("evaluator.evaluator", EVALUATOR)
        if judge["key"] in os.environ:
            use_judge(assertions, judge, Path(job["judge_calls"]))
        elif task.evaluation_criteria.nl_assertions:
            raise RunnerExit(
                EXIT_REFUSED,
                "the judge of the task's assertions has no API key; set environment variable "
                f"{job['keys'][judge['key']]}",
            )
        simulation.reward_info = evaluator.evaluate_simulation(
            simulation=simulation,
            task=task,
            evaluation_type=evaluator.EvaluationType.ALL,
            solo_mode=False,
            domain=job["domain"],
        )
    except Exception as error:
        simulation.info = {**(simulation.info or {}), "evaluation_error": one_line(error)}


def play_quietly(job: dict[str, Any]) -> int:
    """Run `play` with all of tau2's output redirected to the job's log, because a judge reads this program's output.

    Returns: the exit code.
    """
    secrets = [value for name in job["secrets"] if (value := os.environ.get(name))]
    stdout, stderr = (os.fdopen(os.dup(stream), "w", encoding="utf-8", errors="replace") for stream in (1, 2))
    with open(job["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        code, text = 0, play(job)
    except RunnerExit as stopped:
        code, text = stopped.code, str(stopped)
    except Exception as error:
        # tau2's own loop handles the policy's failures, so this failure is not the policy's.
        code, text = PLAY_AGAIN, f"to be played again: {one_line(error)}"
    for secret in secrets:
        text = text.replace(secret, "***")
    print(text[:500], file=stderr if code else stdout, flush=True)
    return code


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if arguments[0] == "check":
        print(json.dumps(check(*arguments[1:])))
        return 0
    hide_environment()
    job = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    if arguments[0] == "play":
        return play_quietly(job)
    try:
        run(job)
    except RunnerExit as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
