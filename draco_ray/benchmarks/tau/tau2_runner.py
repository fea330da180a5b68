"""The program that runs under tau2's own Python: adjusts tau2, then runs the episodes of a job. Imports no draco_ray.

    python -P tau2_runner.py check             one line of JSON about the tau2 that this Python finds
    python -P tau2_runner.py run JOB.json      runs what is missing of a job's episodes

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
from collections.abc import Callable
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
"""What is used and adjusted, by module."""
_PR_SET_DUMPABLE = 4


class RefusedError(Exception):
    """One line: why nothing is run."""


def check() -> dict[str, Any]:
    """What this Python finds under the name of tau2: version, and whether it is the benchmark."""
    try:
        version: str | None = metadata.version("tau2")
    except metadata.PackageNotFoundError:
        version = None
    try:
        importlib.import_module("tau2.runner")
        error = None
    except ImportError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"python": sys.version.split()[0], "version": version, "error": error}


def load() -> dict[str, Any]:
    """Import what is adjusted.

    Raises: RefusedError naming the first part that is not there.
    """
    before = dict(os.environ)
    modules = {}
    for name, attributes in ADJUSTED.items():
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as error:
            raise RefusedError(
                f"{name} cannot be imported ({error}); expected tau2-bench 1.0.1 with its extras"
            ) from error
        for attribute in attributes:
            if not hasattr(modules[name], attribute):
                raise RefusedError(f"{name}.{attribute} is gone; expected tau2-bench 1.0.1")
    sandbox = modules["tau2.knowledge.sandbox_manager"].SandboxManager
    if not hasattr(sandbox, "_create_srt_settings"):
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
    modules = load()
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


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if arguments == ["check"]:
        print(json.dumps(check()))
        return 0
    try:
        run(json.loads(Path(arguments[1]).read_text(encoding="utf-8")))
    except RefusedError as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
