"""The program that runs under tau2's own Python: adjusts tau2, then runs the episodes of a job. Imports no draco_ray.

    python -P tau2_runner.py check             one line of JSON about the tau2 that this Python finds
    python -P tau2_runner.py shell JOB.json    runs commands in the agent's shell, confined as in an episode
    python -P tau2_runner.py run JOB.json      the same where the job has a shell, then what is missing of its episodes

Keys come in environment variables, named in the job, and go nowhere but into clients. Every part of tau2 that is
adjusted is looked up first: where one is gone, nothing is run, because its leak would be open again.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import json
import os
import shlex
import shutil
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
SHELL_PROGRAMS = ("srt", "rg", "bwrap", "socat") if sys.platform.startswith("linux") else ("srt", "rg")
SRT_COMMAND = "-c"
"""``srt``'s option for a line of shell."""
SHELL_COMMANDS = [
    ("ls", "INDEX.md\nopening_hours.md"),
    ("grep -c 'Monday  9 to 5' opening_hours.md", "1"),
    ('cat opening_hours.md | tail -n 1 | tr -d "\'"', "Friday: closed"),
    ("echo \"a  b\" | sed 's/  / /'; echo done", "a b\ndone"),
]
"""Commands with spaces, quotes and pipes, and what they print over the document of `check_shell`."""
SYSTEM = {
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "usr",
    "etc",
    "dev",
    "proc",
    "sys",
    "nix",
    "System",
    "Library",
}
"""Folders of the root directory that hold programs and settings, and no evaluations."""
CONTENT = ("messages", "input", "prompt", "tools", "functions")
"""What a request says; its other keys are its parameters."""
EMBEDDER = "qwen3-embedding-8b"
"""tau2's name of the embedder of alltools-qwen."""
ROLES = {
    "tau2.agent.llm_agent": "agent",
    "tau2.user.user_simulator": "user",
    "tau2.evaluator.evaluator_nl_assertions": "judge",
}
"""Who asks for what a module generates."""
ADJUSTED = {
    "httpx": ("Client",),
    "tau2.data_model.simulation": ("TextRunConfig",),
    "tau2.agent.llm_agent": ("generate",),
    "tau2.user.user_simulator": ("generate",),
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
    for method in ("export_documents", "run_command", "__enter__"):
        if not hasattr(modules["tau2.knowledge.sandbox_manager"].SandboxManager, method):
            raise RefusedError(f"SandboxManager.{method} is gone; expected tau2-bench 1.0.1")
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


def record_requests(modules: dict[str, Any], file: Path) -> None:
    """Write the parameters of every kind of request to ``file``, as they are sent: a line for each that is new.

    tau2 has LiteLLM drop what a model is not known to take, so what a job asks for is not what the wire carries.
    """
    role: contextvars.ContextVar[str] = contextvars.ContextVar("role", default="embedder")
    for name, who in ROLES.items():
        modules[name].generate = _as_role(modules[name].generate, role, who)
    client = modules["httpx"].Client
    send = client.send
    lock, seen = threading.Lock(), set[str]()

    @functools.wraps(send)
    def recorded(self: Any, request: Any, **arguments: Any) -> Any:
        try:
            body = json.loads(request.read())
        except (ValueError, RuntimeError):
            body = None
        if isinstance(body, dict):
            parameters = {name: value for name, value in body.items() if name not in CONTENT}
            line = json.dumps({"role": role.get(), "path": request.url.path, "parameters": parameters}, sort_keys=True)
            with lock:
                if line not in seen:
                    seen.add(line)
                    with file.open("a", encoding="utf-8") as lines:
                        lines.write(line + "\n")
        return send(self, request, **arguments)

    client.send = recorded


def _as_role(generate: Callable[..., Any], role: contextvars.ContextVar[str], who: str) -> Callable[..., Any]:
    @functools.wraps(generate)
    def asked(*args: Any, **kwargs: Any) -> Any:
        token = role.set(who)
        try:
            return generate(*args, **kwargs)
        finally:
            role.reset(token)

    return asked


def confine_shell(module: Any, unreadable: list[str]) -> None:
    """Run the agent's commands without this process's environment, where no solution can be read.

    tau2's sandbox denies reading only what its settings list, and hands down every variable. It gives the command as a
    word, which later versions of ``srt`` take for the name of a program: `SRT_COMMAND` is a line of shell in all.
    """

    def run(command: list[str], **kwargs: Any) -> Any:
        program, option, settings, line = command
        if (program, option) != ("srt", "--settings"):
            raise RefusedError(f"tau2 runs {program} {option}; expected srt --settings of tau2-bench 1.0.1")
        content = json.loads(Path(settings).read_text(encoding="utf-8"))
        denied = content["filesystem"]["denyRead"]
        denied += [path for path in [*unreadable, *surroundings(kept_folders(settings))] if path not in denied]
        Path(settings).write_text(json.dumps(content, indent=2), encoding="utf-8")
        kept = {name: os.environ[name] for name in SHELL_VARIABLES if name in os.environ}
        return subprocess.run([program, option, settings, SRT_COMMAND, line], **{**kwargs, "env": kept})

    # The module's own name for it only: everything else keeps the real one.
    module.subprocess = types.SimpleNamespace(
        run=run, TimeoutExpired=subprocess.TimeoutExpired, CalledProcessError=subprocess.CalledProcessError
    )


def kept_folders(settings: str) -> list[Path]:
    """What a command needs to read beyond the system: its documents, and the programs of the sandbox."""
    folders = [Path(settings).parent]
    for name in (*SHELL_PROGRAMS, "node"):
        if (found := shutil.which(name)) is not None:
            program = Path(found).resolve()
            packages = [parent for parent in program.parents if parent.name == "node_modules"]
            folders += [Path(found).parent, packages[-1] if packages else program.parent]
    return [folder.resolve() for folder in folders]


def surroundings(kept: list[Path]) -> list[str]:
    """Everything that lies beside the folders ``kept`` and the system's: evaluations of others hold solutions as well.

    Looked up anew for every command, as what lies about changes.
    """
    found: set[Path] = set()
    for folder in {parent for each in kept for parent in each.parents}:
        if _of_the_system(folder):
            continue
        try:
            inside = list(folder.iterdir())
        except OSError:
            continue
        for path in inside:
            with contextlib.suppress(OSError):
                real = path.resolve(strict=True)
                needed = any(real == each or real in each.parents or each in real.parents for each in kept)
                if not needed and not _of_the_system(real) and (real.is_dir() or real.is_file()):
                    found.add(real)
    return sorted(str(path) for path in found if not any(parent in found for parent in path.parents))


def _of_the_system(path: Path) -> bool:
    return len(path.parts) > 1 and path.parts[1] in SYSTEM


def check_shell(module: Any, unreadable: list[str]) -> str:
    """Run real commands in the agent's shell; returns which ``srt`` did.

    Raises: RefusedError naming the first command that did not do what it should, or the first path that can be read.
    """
    srt = shutil.which("srt")
    try:
        with module.SandboxManager() as sandbox:
            document = {"id": "opening hours", "title": "Opening hours", "content": "Monday  9 to 5\nFriday: 'closed'"}
            sandbox.export_documents([document], file_format="md")
            # Twice: what one command leaves behind must not stop the next.
            for command, expected in SHELL_COMMANDS * 2:
                code, out, error = sandbox.run_command(command)
                if (code, out.strip()) != (0, expected):
                    said = " ".join((error or out).split())[:300]
                    raise RefusedError(
                        f"the agent's shell does not work: {command!r} gave exit code {code} and {out.strip()[:80]!r} "
                        f"({said}); expected {expected!r}; its program is {srt}; install "
                        "@anthropic-ai/sandbox-runtime as docs/tau_bench.md says, or set tau_bench.retrieval=bm25"
                    )
            for path in unreadable:
                # tau2 refuses paths that are not in quotes before any sandbox sees them.
                quoted = shlex.quote(path) if shlex.quote(path) != path else f"'{path}'"
                _, out, _ = sandbox.run_command(f"{'ls -A' if os.path.isdir(path) else 'cat'} {quoted}; echo looked")
                if out.strip() != "looked":
                    raise RefusedError(
                        f"the agent's shell can read {path}, which holds solutions; its program is {srt}"
                    )
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"the agent's shell cannot be started: {' '.join(str(error).split())[:400]}") from error
    return str(srt)


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
    record_requests(modules, Path(job["requests"]))
    use_judge(modules["tau2.evaluator.evaluator_nl_assertions"], job["judge"], Path(job["judge_calls"]))
    use_embedder(modules, job["embedder"], job["embeddings_cache"])
    shell = modules["tau2.knowledge.sandbox_manager"]
    confine_shell(shell, job["unreadable"])
    if job["shell"]:
        check_shell(shell, job["unreadable"])
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
        job = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
        if arguments[0] == "shell":
            shell = load()["tau2.knowledge.sandbox_manager"]
            confine_shell(shell, job["unreadable"])
            print(check_shell(shell, job["unreadable"]))
        else:
            run(job)
    except RefusedError as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
