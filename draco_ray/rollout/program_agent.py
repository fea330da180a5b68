"""An agent that is a program of the user: it does one task and samples from the policy through an HTTP endpoint."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from draco_ray.config.schema import AgentConfig
from draco_ray.environments.base import World
from draco_ray.environments.program import Ran, passed_environment, run_program
from draco_ray.environments.tasks import WORKSPACE
from draco_ray.errors import ConfigError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import Policy, RolloutRequest, end_of, fill_agent_prompt
from draco_ray.rollout.endpoint.episode import Episode
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.endpoint.world_tools import WorldTools
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy
from draco_ray.temp_dirs import PrivateTempDir

RUNNER = "draco_ray.rollout.call_function"
PLAY_AGAIN = os.EX_TEMPFAIL
"""Exit code of a program for failures that are not the policy's."""
_SAID_CHARACTERS = 300
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Errors of starting a program that every attempt would get; others mean that the machine is out of resources."""


class ProgramAgent:
    """Starts ``agent.command`` (or ``agent.function`` in a process of its own) once per episode.

    If the task lists tools, the program acts by calling them (`WorldTools`). Otherwise its output, if it exits
    normally, is the only action.
    """

    def __init__(self, policy: Policy, config: AgentConfig, template: str) -> None:
        """Find the program. Raises: ConfigError: there is none, or the policy has no tokens."""
        if not isinstance(policy, TokenPolicy):
            raise ConfigError(f"agent.use=command: policy {policy.name} has no tokens to record")
        self._policy, self._config, self._template = policy, config, template
        self._words = _words(config)

    @staticmethod
    def check(config: AgentConfig, policies: object) -> None:
        """Check the program and the policies before workers are started.

        Raises: ConfigError: there is no program, or ``policies`` are those of an API.
        """
        if not isinstance(policies, EnginePolicies):
            raise ConfigError(
                "agent.use=command records tokens: it plays with a policy of the engines, not with an API"
            )
        _words(config)

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """See `Agent`; the program gets it on standard input."""
        return fill_agent_prompt(self._template, task)

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """See `Agent`.

        Raises: what the policy raises; ConfigError: the program can never be started; EnvironmentCrashed: this machine
            is out of resources.
        """
        task = world.task
        prompt = self.prompt(task)
        episode = Episode(task, request, self._policy, self._config)
        tools = WorldTools(world, self._config) if task.tools else None
        try:
            with PrivateTempDir() as scratch:
                async with shared_endpoint().serving(episode, tools) as base_url:
                    ran = await run_program(
                        self._words,
                        folder=self._config.folder,
                        environment=self._environment(scratch, task, prompt, episode.key, base_url),
                        told="\n\n".join(message.content for message in prompt) + "\n",
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
        return episode.trajectory(ended, why, prompt=prompt, closing=_closing(ran, self._config))

    def _end(self, episode: Episode, ran: Ran) -> tuple[EpisodeEnd, str | None]:
        """How the episode ended, and a reason unless it ended normally."""
        how = f"ended with exit code {ran.exit_code}"
        if ran.exit_code is None:
            how = f"did not end within agent.timeout_seconds={self._config.timeout_seconds:g}"
        elif ran.exit_code < 0:
            how = f"was ended by signal {-ran.exit_code}"
        last = " ".join((ran.errors.strip() or ran.output.strip()).split())[-_SAID_CHARACTERS:]
        said = f"; its last words: {last}" if last else ""
        if not episode.turns:
            asked = f"got no answer: {episode.complaint}" if episode.complaint else "never called the endpoint"
            return EpisodeEnd.SERVER_ERROR, f"the agent's program {how} and {asked}{said}"
        if ran.exit_code == PLAY_AGAIN and episode.refused is None:
            return EpisodeEnd.SERVER_ERROR, f"the agent's program asks to be played again{said}"
        if ran.exit_code == 0:
            return episode.refused or EpisodeEnd.FINISHED, None
        if episode.refused is not None:
            return episode.refused, f"the agent's program {how} after the limit{said}"
        return EpisodeEnd.CRASHED, f"the agent's program {how}{said}"

    def _environment(
        self, scratch: Path, task: Task, prompt: tuple[Message, ...], key: str, base_url: str
    ) -> Mapping[str, str]:
        """Environment variables of the program: those passed on, and its own."""
        file = scratch / "task.json"
        told = {
            "task_id": task.task_id,
            "group": task.group,
            "instruction": task.instruction,
            "fields": {**task.fields},
            "messages": [{"role": message.role, "content": message.content} for message in prompt],
        }
        file.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8", errors="replace")
        work = task.fields.get(WORKSPACE) or str(scratch)
        tools = {"DRACO_TOOLS_URL": f"{base_url}/tools"} if task.tools else {}
        return (
            passed_environment(self._config.pass_environment)
            | tools
            | {
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_BASE": base_url,
                "OPENAI_API_KEY": key,
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


def _words(config: AgentConfig) -> list[str]:
    if (config.command is None) == (config.function is None):
        raise ConfigError(
            "agent.use=command: expected agent.command='python my_agent.py', or agent.function=file.py:name"
        )
    if not config.folder.is_dir():
        raise ConfigError(f"agent.folder={str(config.folder)!r}: no such folder")
    if config.function is not None:
        module = config.function.rpartition(":")[0]
        if module.endswith(".py"):
            _check_script("agent.function", module, config.folder)
        return [sys.executable, "-m", RUNNER, config.function]
    try:
        words = shlex.split(config.command or "")
    except ValueError as error:
        raise ConfigError(f"agent.command={config.command!r}: {error}") from None
    if not words:
        raise ConfigError("agent.command: empty; expected a command such as 'python my_agent.py'")
    # As the program will be looked for: in its folder if it has a slash, else on PATH. A bare "python" is this
    # interpreter, whether or not its virtual environment is active.
    if words[0] == "python":
        words[0] = sys.executable
    found = shutil.which(str(config.folder / words[0]) if "/" in words[0] else words[0])
    if found is None:
        raise ConfigError(f"agent.command: no program {words[0]!r} that can be run (agent.folder is {config.folder})")
    if len(words) > 1 and words[1].endswith((".py", ".sh")):
        _check_script("agent.command", words[1], config.folder)
    return [str(Path(found).absolute()), *words[1:]]


def _check_script(key: str, script: str, folder: Path) -> None:
    """Check that the script exists, before every rollout fails on it. Raises: ConfigError."""
    if not (folder / script).is_file():
        raise ConfigError(f"{key}: no file {script!r} (agent.folder is {folder})")


def _closing(ran: Ran, config: AgentConfig) -> str:
    how = "ended for its time" if ran.exit_code is None else f"exit code {ran.exit_code}"
    parts = [f"The agent's program: {how} after {ran.seconds:.1f} s."]
    for name, text in (("standard output", ran.output), ("standard error", ran.errors)):
        if text.strip():
            parts.append(f"{name}:\n{text.strip()}")
    return "\n".join(parts)
