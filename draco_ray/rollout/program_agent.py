"""An agent that is a program: it does one task and calls the policy through its own HTTP endpoint."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from draco_ray.config.schema import AgentConfig, ConfigSection
from draco_ray.environments.base import World
from draco_ray.environments.jail.program import ENDPOINT_PATH
from draco_ray.environments.program import Command, ProgramResult, passed_env_vars, run_program
from draco_ray.environments.tasks import WORKSPACE_FIELD
from draco_ray.environments.workspace import Workspace
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import Policy, RolloutRequest, end_of, fill_agent_prompt
from draco_ray.rollout.code_block import cut_output
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.endpoint.world_tools import WorldTools
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy
from draco_ray.temp_dirs import PrivateTempDir

HARNESSES_FOLDER = Path(__file__).parent / "harnesses"
"""Folder of the recipes (`Harness`) that this package includes."""
_VERSION_SECONDS = 60.0


class Harness(ConfigSection):
    """A recipe for an agent program (``agent.harness``). Command and variables may contain the placeholders
    ``{prompt}``, ``{model}`` and environment variables of the program, such as ``{OPENAI_BASE_URL}``."""

    command: tuple[str, ...]
    """The program and its arguments; no shell is used. The prompt is also on standard input."""
    dialect: Literal["chat/completions", "responses", "messages"]
    """The endpoint's API that the program calls; only informs readers of the recipe."""
    variables: Mapping[str, str] = {}
    side_calls: tuple[str, ...] = ()
    """Regular expressions that identify side calls, as in ``agent.side_calls``."""
    versions: tuple[str, str]
    """The first version that was tested, and the first that is too new."""

    def fill(self, words: list[str], variables: Mapping[str, str], prompt: str) -> tuple[list[str], dict[str, str]]:
        """Fill the placeholders. Returns: the command's words, and the variables to add to the given ones."""
        values: dict[str, str] = {**variables, "prompt": prompt, "model": variables["DRACO_MODEL"]}

        def filled(text: str) -> str:
            return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)

        return [filled(word) for word in words], {name: filled(text) for name, text in self.variables.items()}

    def check_version(self, program: str) -> None:
        """Check the version that the program prints. Raises: ConfigError if it is outside ``versions``."""
        try:
            with PrivateTempDir() as home:
                ran = subprocess.run(
                    [program, "--version"],
                    env={**passed_env_vars(()), "HOME": str(home)},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_VERSION_SECONDS,
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"agent.harness: {program} --version: {error}") from None
        found = re.search(r"\d+(\.\d+)+", ran.stdout + ran.stderr)
        first, end = self.versions
        if found is None or not _numbers(first) <= _numbers(found[0]) < _numbers(end):
            version = found[0] if found else "unknown"
            raise ConfigError(
                f"agent.harness: {program} has version {version}; expected at least {first} and below {end}"
            )


def read_harness(name: str) -> Harness:
    """Read a recipe by its name or from a YAML file. Raises: ConfigError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else HARNESSES_FOLDER / f"{name}.yaml"
    try:
        return Harness.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError:
        known = ", ".join(sorted(each.stem for each in HARNESSES_FOLDER.glob("*.yaml")))
        raise ConfigError(f"agent.harness={name!r}: unknown; expected {known}, or a YAML file") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"agent.harness={name!r}: {' '.join(str(error).split())}") from None


def program_files(program: str) -> list[Path]:
    """The paths that a program reads to run: itself, its virtual environment or ``node_modules``, its interpreter."""
    found: list[Path] = []
    for path in dict.fromkeys((Path(program), Path(program).resolve())):
        environment = path.parent.parent
        modules = [parent for parent in path.parents if parent.name == "node_modules"]
        if modules:
            found.append(modules[-1])
            if node := shutil.which("node"):
                found.append(Path(node).resolve())
        elif (environment / "pyvenv.cfg").is_file():
            found += [environment, (environment / "bin" / "python").resolve().parent.parent]
        else:
            found.append(path)
    return found


def _numbers(version: str) -> list[Any]:
    return [int(part) for part in version.split(".")]


RUNNER_MODULE = "draco_ray.rollout.call_function"
PLAY_AGAIN = os.EX_TEMPFAIL
"""Exit code with which a program reports a failure that the policy did not cause; its rollout is repeated."""
TASK_FILE = "/run/draco/task.json"
"""Value of ``DRACO_TASK_FILE`` in a jail."""
_SCRIPTS = (".py", ".sh")
_SAID_CHARACTERS = 300
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Error numbers after which a retry to start a program is useless; others mean that the machine lacks resources."""


class ProgramAgent:
    """Starts ``agent.command`` (or ``agent.function`` in a process of its own) once per episode.

    If the task lists tools, the program acts in the world through them (`WorldTools`). Otherwise the program's standard
    output is the only action in the world, sent once the program has ended by itself.
    """

    def __init__(self, policy: Policy, config: AgentConfig, template: str) -> None:
        """Find the program. Raises: ConfigError if there is none, or the policy has no tokens."""
        if not isinstance(policy, TokenPolicy):
            raise ConfigError(f"agent.use=command: policy {policy.name} has no tokens to record")
        self._harness = read_harness(config.harness) if config.harness is not None else None
        rules = (*config.side_calls, *(self._harness.side_calls if self._harness else ()))
        self._policy, self._template = policy, template
        self._config = config.model_copy(update={"side_calls": rules})
        self._words = _words(config, self._harness)

    @staticmethod
    def check(config: AgentConfig, policies: object) -> None:
        """Check the configuration before workers are started.

        Raises: ConfigError if there is no program, or ``policies`` use an API instead of engines.
        """
        if not isinstance(policies, EnginePolicies):
            raise ConfigError("agent.use=command records tokens, so it needs a policy on an engine, not an API model")
        harness = read_harness(config.harness) if config.harness is not None else None
        words = _words(config, harness)
        if harness is not None and config.container is None:
            harness.check_version(words[0])

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`: the prompt, which the program gets on standard input."""
        return fill_agent_prompt(self._template, task)

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """See `Agent`.

        Raises: what the policy raises; ConfigError if the program can never be started; EnvironmentCrashed if this
            machine is out of resources.
        """
        task = world.task
        prompt = self.prompt(task)
        tools = WorldTools(world, self._config) if task.tools else None
        episode = Episode(request, self._policy, self._config, tools)
        workspace: Workspace | None = getattr(world, "workspace", None)
        if self._harness is not None and workspace is None:
            raise ConfigError(f"agent.harness={self._config.harness}: expected environment.use=workspace")
        if self._config.container is not None and workspace is None:
            raise ConfigError("agent.container: expected environment.use=workspace")
        told = "\n\n".join(message.content for message in prompt) + "\n"
        try:
            with PrivateTempDir() as scratch:
                async with shared_endpoint().serving(episode) as base_url:
                    variables = self._environment(scratch, task, prompt, episode.key, base_url)
                    ran = await run_program(
                        self._command(workspace, variables, told),
                        told=told,
                        seconds=self._config.timeout_seconds,
                        most_bytes=self._config.max_output_characters,
                        until=episode.failed,
                    )
        except OSError as error:
            kind = ConfigError if error.errno in _NO_PROGRAM else EnvironmentCrashed
            raise kind(f"agent.command: {self._words[0]!r} cannot be started: {error}") from error
        if episode.failed.done():
            episode.failed.result()
        ended, why = self._end(episode, ran)
        if tools is not None and tools.crash is not None:
            ended, why = end_of(tools.crash), str(tools.crash)
        elif ended is EpisodeEnd.FINISHED and tools is None:
            try:
                await world.act(ran.output)
            except EnvironmentCrashed as crash:
                ended, why = end_of(crash), str(crash)
        closing = _closing(ran)
        if workspace is not None:
            closing += f"\n{await _changes(workspace, self._config)}"
        return episode.trajectory(ended, why, prompt=prompt, closing=closing)

    def _command(self, workspace: Workspace | None, variables: Mapping[str, str], told: str) -> Command:
        """The command that starts the program, in the workspace's jail if there is a workspace."""
        if workspace is None:
            return Command(words=self._words, environment=dict(variables), folder=self._config.folder)
        words, variables = self._words, dict(variables)
        if self._harness is not None:
            words, more = self._harness.fill(words, variables, told)
            variables |= more
        reads: list[Path] = []
        if self._config.container is None:
            script = self._config.folder / words[1] if len(words) > 1 else None
            if script is not None and words[1].endswith(_SCRIPTS):
                words = [words[0], str(script.absolute()), *words[2:]]
            reads = [*program_files(words[0]), *([script] if script is not None and script.is_file() else [])]
        file = variables["DRACO_TASK_FILE"]
        mapped = {ENDPOINT_PATH: shared_endpoint().socket_path, TASK_FILE: file}
        port = int(variables["OPENAI_BASE_URL"].split(":")[2].partition("/")[0])
        started = workspace.command(
            words, {**variables, "DRACO_TASK_FILE": TASK_FILE}, port=port, mapped=mapped, reads=reads
        )
        if not workspace.confined:
            started.environment["DRACO_TASK_FILE"] = file
        return started

    def _end(self, episode: Episode, ran: ProgramResult) -> tuple[EpisodeEnd, str | None]:
        """How the episode ended, and the error, if any."""
        how = f"ended with exit code {ran.exit_code}"
        if ran.exit_code is None:
            how = f"did not end within agent.timeout_seconds={self._config.timeout_seconds:g}"
        elif ran.exit_code < 0:
            how = f"was killed by signal {-ran.exit_code}"
        last = " ".join((ran.errors.strip() or ran.output.strip()).split())[-_SAID_CHARACTERS:]
        said = f"; its last output: {last}" if last else ""
        if not episode.turns:
            asked = f"got no answer: {episode.complaint}" if episode.complaint else "never called the endpoint"
            return EpisodeEnd.SERVER_ERROR, f"the agent's program {how} and {asked}{said}"
        if ran.exit_code == PLAY_AGAIN and episode.refused is None:
            return EpisodeEnd.SERVER_ERROR, f"the agent's program asks for a repetition of the rollout{said}"
        if ran.exit_code == 0:
            return episode.refused or EpisodeEnd.FINISHED, None
        if episode.refused is not None:
            return episode.refused, f"the agent's program {how} after it had reached a limit{said}"
        return EpisodeEnd.CRASHED, f"the agent's program {how}{said}"

    def _environment(
        self, scratch: Path, task: Task, prompt: tuple[Message, ...], key: str, base_url: str
    ) -> Mapping[str, str]:
        """The environment variables of one program: those passed on from this process, and its own."""
        file = scratch / "task.json"
        told = {
            "task_id": task.task_id,
            "group": task.group,
            "instruction": task.instruction,
            "fields": {**task.fields},
            "messages": [{"role": message.role, "content": message.content} for message in prompt],
        }
        file.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8", errors="replace")
        work = task.fields.get(WORKSPACE_FIELD) or str(scratch)
        tools = {"DRACO_TOOLS_URL": f"{base_url}/tools"} if task.tools else {}
        return (
            passed_env_vars(self._config.pass_environment)
            | tools
            | {
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_BASE": base_url,
                "OPENAI_API_KEY": key,
                # Anthropic's clients append the version themselves.
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": key,
                "NO_PROXY": "127.0.0.1,localhost",
                "no_proxy": "127.0.0.1,localhost",
                "TMPDIR": str(scratch),
                "PYTHONUNBUFFERED": "1",
                "DRACO_TASK_FILE": str(file),
                "DRACO_TASK_ID": task.task_id,
                "DRACO_MODEL": "policy",
                "DRACO_WORKSPACE": work,
            }
        )


def _words(config: AgentConfig, harness: Harness | None) -> list[str]:
    if [config.command, config.function, config.harness].count(None) != 2:
        raise ConfigError(
            "agent.use=command: expected agent.command='python my_agent.py', agent.function=file.py:name, or "
            "agent.harness=codex"
        )
    if not config.folder.is_dir():
        raise ConfigError(f"agent.folder={str(config.folder)!r}: no such folder")
    if config.function is not None:
        if config.container is not None:
            raise ConfigError("agent.container: expected agent.command or agent.harness, found agent.function")
        module = config.function.rpartition(":")[0]
        if module.endswith(".py"):
            _check_script("agent.function", module, config.folder)
        return [sys.executable, "-m", RUNNER_MODULE, config.function]
    try:
        words = [*harness.command] if harness else shlex.split(config.command or "")
    except ValueError as error:
        raise ConfigError(f"agent.command={config.command!r}: {error}") from None
    if not words:
        raise ConfigError("agent.command: empty; expected a command such as 'python my_agent.py'")
    if config.container is not None:
        # The command runs in the container's image, so only the container engine is checked here.
        engine = shlex.split(config.container)
        if not engine or shutil.which(engine[0]) is None:
            raise ConfigError(f"agent.container={config.container!r}: no program {' '.join(engine[:1])!r} on PATH")
        return words
    # Look for the program in agent.folder if its name has a slash, else on PATH. A bare "python" means this process's
    # interpreter, whether or not its virtual environment is active.
    if words[0] == "python":
        words[0] = sys.executable
    found = shutil.which(str(config.folder / words[0]) if "/" in words[0] else words[0])
    if found is None:
        key = f"agent.harness={config.harness}" if harness else "agent.command"
        raise ConfigError(f"{key}: {words[0]!r} is not an executable program (agent.folder is {config.folder})")
    if harness is None and len(words) > 1 and words[1].endswith(_SCRIPTS):
        _check_script("agent.command", words[1], config.folder)
    return [str(Path(found).absolute()), *words[1:]]


def _check_script(key: str, script: str, folder: Path) -> None:
    """Check early that a script exists, because otherwise every rollout would fail. Raises: ConfigError."""
    if not (folder / script).is_file():
        raise ConfigError(f"{key}: file {script!r} does not exist (agent.folder is {folder})")


async def _changes(workspace: Workspace, config: AgentConfig) -> str:
    """A text for the judge on the files that the program changed."""
    try:
        diff = await workspace.changes()
    except EnvironmentCrashed as crash:
        # The program may have caused this error, so the rollout is still judged.
        return f"What it changed cannot be compared: {crash}"
    return f"What it changed:\n{cut_output(diff, config.max_output_characters)}" if diff else "It changed no file."


def _closing(ran: ProgramResult) -> str:
    how = "stopped at its time limit" if ran.exit_code is None else f"exit code {ran.exit_code}"
    parts = [f"The agent's program: {how} after {ran.seconds:.1f} s."]
    for name, text in (("standard output", ran.output), ("standard error", ran.errors)):
        if text.strip():
            parts.append(f"{name}:\n{text.strip()}")
    return "\n".join(parts)
