"""The program that runs under tau2's own Python: adjusts tau2, then runs the episodes of a job. Imports no draco_ray.

    python -P tau2_runner.py check [DOMAIN]    one line of JSON about the tau2 that this Python finds, and of a domain
    python -P tau2_runner.py run JOB.json      runs what is missing of a job's episodes
    python -P tau2_runner.py play JOB.json     plays one episode of a training run, the policy behind its endpoint

Keys come in environment variables, named in the job, and go nowhere but into clients. Every part of tau2 that is
adjusted is looked up first: where one is gone, nothing is run, because its leak would be open again.
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
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REFUSED = 3
"""Exit code of a refusal; the last line on stderr says why."""
SHELL_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""All that a command of the agent's shell gets to know of this process's environment."""
EMBEDDER = "qwen3-embedding-8b"
"""tau2's name of the embedder of alltools-qwen."""
ADJUSTED = {
    "tau2.data_model.simulation": ("TextRunConfig",),
    "tau2.runner.helpers": ("get_tasks",),
    "tau2.runner.batch": ("run_tasks",),
    "tau2.evaluator.evaluator_nl_assertions": (
        "DEFAULT_LLM_NL_ASSERTIONS",
        "DEFAULT_LLM_NL_ASSERTIONS_ARGS",
        "generate",
    ),
    "tau2.knowledge.embedders.openrouter_embedder": ("OpenAI", "OpenRouterEmbedder"),
    "tau2.knowledge.embeddings_cache": ("EmbeddingsCache", "_global_cache"),
    "tau2.knowledge.sandbox_manager": ("SandboxManager", "subprocess"),
}
"""What is used and adjusted of an evaluation, by module."""
PLAYED = {
    "tau2.data_model.simulation": ("Results", "TerminationReason", "TextRunConfig"),
    "tau2.runner.helpers": ("get_info", "get_tasks"),
    "tau2.runner.build": ("build_orchestrator",),
    "tau2.runner.progress": ("run_with_retry",),
    "tau2.evaluator.evaluator": ("EvaluationType", "evaluate_simulation"),
    "tau2.evaluator.evaluator_nl_assertions": ADJUSTED["tau2.evaluator.evaluator_nl_assertions"],
}
"""What is used and adjusted of one episode."""
PLAY_AGAIN = 75
"""Exit code of an episode that failed for another reason than the policy: EX_TEMPFAIL of sysexits.h."""
_PR_SET_DUMPABLE = 4


class RefusedError(Exception):
    """One line: why nothing is run."""


def check(domain: str | None = None) -> dict[str, Any]:
    """What this Python finds under the name of tau2: version, whether it is the benchmark, and what a domain has."""
    try:
        version: str | None = metadata.version("tau2")
    except metadata.PackageNotFoundError:
        version = None
    try:
        importlib.import_module("tau2.runner")
        error = None
    except ImportError as failure:
        error = f"{type(failure).__name__}: {failure}"
    found: dict[str, Any] = {"python": sys.version.split()[0], "version": version, "error": error}
    if domain is not None and error is None:
        found["domain"] = _described(domain)
    return found


def _described(domain: str) -> dict[str, Any]:
    """The policy of a domain's agent, its tools and its customers', as JSON schemas; or why it cannot be used."""
    try:
        environment = importlib.import_module("tau2.runner.build").build_environment(domain)
        told = {"policy": environment.get_policy(), "tools": [tool.openai_schema for tool in environment.get_tools()]}
    except Exception as failure:
        return {"error": " ".join(f"{type(failure).__name__}: {failure}".split())[:300]}
    try:
        told["user_tools"] = [tool.openai_schema for tool in environment.get_user_tools()]
    except Exception:
        # Most domains' customers have none, and tau2 says so by raising.
        told["user_tools"] = []
    return told


def load(parts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Import what is used and adjusted, attributes by module.

    Raises: RefusedError naming the first part that is not there.
    """
    before = dict(os.environ)
    modules = {}
    for name, attributes in parts.items():
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            raise RefusedError(
                f"{name} cannot be imported ({error}); expected tau2-bench 1.0.1 with its extras"
            ) from error
        for attribute in attributes:
            if not hasattr(modules[name], attribute):
                raise RefusedError(f"{name}.{attribute} is gone; expected tau2-bench 1.0.1")
    sandbox = modules.get("tau2.knowledge.sandbox_manager")
    if sandbox is not None and not hasattr(sandbox.SandboxManager, "_create_srt_settings"):
        raise RefusedError("SandboxManager._create_srt_settings is gone; expected tau2-bench 1.0.1")
    # Importing tau2 reads a .env file, which would bring other endpoints and keys than the job's.
    os.environ.clear()
    os.environ.update(before)
    return modules


def use_judge(evaluator: Any, judge: dict[str, Any], calls: Path) -> None:
    """Set the judge of natural-language assertions, and write the tokens of every call to ``calls``."""
    evaluator.DEFAULT_LLM_NL_ASSERTIONS = judge["model"]
    evaluator.DEFAULT_LLM_NL_ASSERTIONS_ARGS = {
        **judge["args"],
        **({"api_base": judge["api_base"]} if judge["api_base"] else {}),
        "api_key": os.environ[judge["key"]],
    }
    generate: Callable[..., Any] = evaluator.generate
    lock = threading.Lock()

    @functools.wraps(generate)
    def counted(*args: Any, **kwargs: Any) -> Any:
        message = generate(*args, **kwargs)
        with lock, calls.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"usage": message.usage}) + "\n")
        return message

    evaluator.generate = counted


def use_embedder(modules: dict[str, Any], embedder: dict[str, Any], cache: str) -> None:
    """Set the embedder's endpoint and name, and where embeddings are kept."""
    module = modules["tau2.knowledge.embedders.openrouter_embedder"]
    known = getattr(module.OpenRouterEmbedder, "SUPPORTED_MODELS", {}).get(EMBEDDER)
    if known is None or "api_string" not in known:
        raise RefusedError(f"OpenRouterEmbedder no longer knows {EMBEDDER}; expected tau2-bench 1.0.1")
    known["api_string"] = embedder["model"]
    client = module.OpenAI
    endpoint = {"base_url": embedder["api_base"], "api_key": os.environ.get(embedder["key"], "")}
    module.OpenAI = lambda **arguments: client(**{**arguments, **endpoint})
    embeddings = modules["tau2.knowledge.embeddings_cache"]
    embeddings._global_cache = embeddings.EmbeddingsCache(cache)


def confine_shell(module: Any, unreadable: list[str]) -> None:
    """Take the environment and the files that hold solutions away from the agent's shell.

    tau2's sandbox denies reading only what its settings list, and hands down every variable.
    """
    create = module.SandboxManager._create_srt_settings

    def settings(manager: Any) -> None:
        create(manager)
        content = json.loads(Path(manager.settings_path).read_text(encoding="utf-8"))
        content["filesystem"]["denyRead"] += unreadable
        Path(manager.settings_path).write_text(json.dumps(content, indent=2), encoding="utf-8")

    module.SandboxManager._create_srt_settings = settings

    def run(*args: Any, **kwargs: Any) -> Any:
        kept = {name: os.environ[name] for name in SHELL_VARIABLES if name in os.environ}
        return subprocess.run(*args, **{**kwargs, "env": kept})

    # The module's own name for it only: everything else keeps the real one.
    module.subprocess = types.SimpleNamespace(
        run=run, TimeoutExpired=subprocess.TimeoutExpired, CalledProcessError=subprocess.CalledProcessError
    )


def close_to_inspection() -> None:
    """Keep other processes of this user from reading this one's environment in /proc (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def run(job: dict[str, Any]) -> None:
    """Run the episodes that are not in the job's result folder yet.

    Raises: RefusedError.
    """
    close_to_inspection()
    modules = load(ADJUSTED)
    use_judge(modules["tau2.evaluator.evaluator_nl_assertions"], job["judge"], Path(job["judge_calls"]))
    use_embedder(modules, job["embedder"], job["embeddings_cache"])
    confine_shell(modules["tau2.knowledge.sandbox_manager"], job["unreadable"])
    config = modules["tau2.data_model.simulation"].TextRunConfig(
        domain=job["domain"],
        retrieval_config=job["retrieval"],
        llm_agent=job["agent"]["model"],
        llm_args_agent=job["agent"]["args"],
        llm_user=job["user"]["model"],
        llm_args_user=job["user"]["args"],
        num_trials=job["trials"],
        max_steps=job["max_steps"],
        max_concurrency=job["concurrency"],
        max_retries=job["episode_retries"],
        timeout=job["episode_timeout_seconds"],
        seed=job["seed"],
        auto_resume=True,
        workers=0,
    )
    tasks = modules["tau2.runner.helpers"].get_tasks(job["domain"], task_ids=job["tasks"])
    modules["tau2.runner.batch"].run_tasks(
        config, tasks, save_path=Path(job["results"]), results_format="dir", console_display=False
    )


def play(job: dict[str, Any], say: Callable[[str], None]) -> str | None:
    """Play one episode with tau2's own orchestrator, agent and user simulator, and write tau2's result file.

    Only a job that says ``evaluate`` is scored; for any other the task is without its criteria from the start.

    Args:
        job: of `draco_ray.benchmarks.tau.environment`.
        say: is told how it ended.

    Returns: why it has to be played again, where that was no doing of the policy's; else None.
    Raises: RefusedError; EpisodeFailed.
    """
    modules = load(PLAYED)
    simulations, helpers = modules["tau2.data_model.simulation"], modules["tau2.runner.helpers"]
    config = simulations.TextRunConfig(
        domain=job["domain"],
        llm_agent=job["agent"]["model"],
        llm_args_agent=job["agent"]["args"],
        llm_user=job["user"]["model"],
        llm_args_user=job["user"]["args"],
        num_trials=1,
        max_steps=job["max_steps"],
        seed=job["seed"],
    )
    (task,) = helpers.get_tasks(job["domain"], task_ids=[job["task"]])
    if not job["evaluate"]:
        task = task.model_copy(update={"evaluation_criteria": None})
    lost: list[str] = []

    def once() -> Any:
        orchestrator = modules["tau2.runner.build"].build_orchestrator(config, task, seed=job["seed"])
        watch_user(orchestrator.user, lost)
        simulation = orchestrator.run()
        simulation.policy = orchestrator.environment.get_policy()
        return simulation

    simulation = modules["tau2.runner.progress"].run_with_retry(
        once, task=task, trial=0, seed=job["seed"], max_retries=0, console_display=False
    )
    failed = simulation.termination_reason == simulations.TerminationReason.INFRASTRUCTURE_ERROR
    if job["evaluate"] and not failed:
        _evaluate(modules, job, task, simulation)
    simulations.Results(info=helpers.get_info(config), tasks=[task], simulations=[simulation]).save(
        Path(job["results"])
    )
    if lost:
        return f"the user simulator: {lost[0]}"
    if failed:
        said = simulation.info or {}
        raise EpisodeFailed(f"tau2 ended the episode: {said.get('error_type')}: {said.get('error')}")
    say(f"The episode ended: {simulation.termination_reason.value}.")
    return None


def watch_user(user: Any, lost: list[str]) -> None:
    """Note in ``lost`` what the user simulator fails with: its model's failures are not the policy's."""
    answer = user.generate_next_message

    @functools.wraps(answer)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            message, state = answer(*args, **kwargs)
            message.validate()
        except Exception as error:
            lost.append(" ".join(f"{type(error).__name__}: {error}".split())[:300])
            raise
        return message, state

    user.generate_next_message = watched


def _evaluate(modules: dict[str, Any], job: dict[str, Any], task: Any, simulation: Any) -> None:
    """Set the episode's reward; what cannot be evaluated keeps none, and says why."""
    evaluator = modules["tau2.evaluator.evaluator"]
    try:
        if job["judge"]["key"] in os.environ:
            use_judge(modules["tau2.evaluator.evaluator_nl_assertions"], job["judge"], Path(job["judge_calls"]))
        elif task.evaluation_criteria.nl_assertions:
            raise RefusedError(f"the judge of its assertions has no key in {job['keys'][job['judge']['key']]}")
        simulation.reward_info = evaluator.evaluate_simulation(
            simulation=simulation,
            task=task,
            evaluation_type=evaluator.EvaluationType.ALL,
            solo_mode=False,
            domain=job["domain"],
        )
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        simulation.info = {**(simulation.info or {}), "evaluation_error": said}


class EpisodeFailed(Exception):
    """One line: what the policy has done that tau2 could not go on with."""


def play_quietly(job: dict[str, Any]) -> int:
    """`play`, with all that tau2 prints in the job's log: a judge reads what this program prints.

    Returns: the exit code.
    """
    close_to_inspection()
    secrets = [value for name in job["secrets"] if (value := os.environ.get(name))]
    streams = [os.fdopen(os.dup(stream), "w", encoding="utf-8", errors="replace") for stream in (1, 2)]
    with open(job["log"], "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def say(stream: int, text: str) -> None:
        for secret in secrets:
            text = text.replace(secret, "***")
        print(text[:500], file=streams[stream], flush=True)

    try:
        again = play(job, functools.partial(say, 0))
    except (RefusedError, EpisodeFailed) as error:
        say(1, " ".join(str(error).split()))
        return REFUSED if isinstance(error, RefusedError) else 1
    except Exception as error:
        # Nothing of the policy's is done outside of tau2's own loop.
        again = " ".join(f"{type(error).__name__}: {error}".split())
    if again is not None:
        say(1, f"to be played again: {again}")
        return PLAY_AGAIN
    return 0


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if arguments[0] == "check":
        print(json.dumps(check(*arguments[1:])))
        return 0
    job = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    if arguments[0] == "play":
        return play_quietly(job)
    try:
        run(job)
    except RefusedError as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
