"""The interfaces of a rollout: an agent turns an open task and a policy into a trajectory.

::

    Agent ──► Conversation (the messages so far, and their tokens) ──► an engine, or an API
      └─────► World (draco_ray.environments.base)

An agent interprets turns and chooses what the policy sees next; a conversation samples and records the tokens.
`draco_ray.records.is_step` defines for all agents what a step is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from draco_ray.config.load import project_file
from draco_ray.config.schema import AgentConfig
from draco_ray.engine.tool_calls import ParsedToolCalls
from draco_ray.environments.base import World
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldBroken
from draco_ray.records import BoolArray, EpisodeEnd, FloatArray, IntArray, Message, Task, Trajectory, Usage
from draco_ray.registry import find_component

SPLIT = "--- user ---"

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def find_prompt(path: Path) -> Path:
    """The template file that ``agent.prompt`` names; see `project_file` for where it is searched.

    Raises: ConfigError: there is no such file.
    """
    with contextlib.suppress(ConfigError):
        path = project_file(path)
    if path.is_file():
        return path
    raise ConfigError(
        f"agent prompt {str(path)!r} does not exist; set agent.prompt to a template file such as "
        "prompts/agent_think.txt"
    )


def agent_template(chosen: Path | None, own: Path | str) -> str:
    """The text of the agent's template.

    Args:
        chosen: ``agent.prompt``.
        own: used if ``agent.prompt`` is null: `draco_ray.environments.base.Environment.agent_prompt`.

    Raises: ConfigError: the template is missing, cannot be read, or has no placeholder for the task.
    """
    source = own if chosen is None else chosen
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        template = source if isinstance(source, str) else find_prompt(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"agent prompt {str(source)!r} cannot be read: {error}") from None
    if "{task_description}" not in template:
        name = repr(str(source)) if isinstance(source, Path) else "of the environment"
        raise ConfigError(
            f"agent prompt {name} has no {{task_description}}, so the agent would not know its task; add it"
        )
    return template


def render_agent_prompt(path: Path, task: Task) -> tuple[Message, ...]:
    """`fill_agent_prompt` with a template file. Raises: as `agent_template`."""
    return fill_agent_prompt(agent_template(path, path), task)


def fill_agent_prompt(template: str, task: Task) -> tuple[Message, ...]:
    """The first messages of an episode.

    All placeholders are filled in one pass, so that a placeholder or a split line inside an instruction remains text.
    """
    values = {**task.fields, "task_description": task.instruction}
    parts = re.split(rf"^{re.escape(SPLIT)}$\n?", template, maxsplit=1, flags=re.MULTILINE)
    filled = [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), part).strip() for part in parts]
    if len(filled) == 1:
        return (Message(role="user", content=filled[0]),)
    return (Message(role="system", content=filled[0]), Message(role="user", content=filled[1]))


AGENTS: Mapping[str, str] = {
    "code": "draco_ray.rollout.turn_agent:CodeAgent",
    "command": "draco_ray.rollout.program_agent:ProgramAgent",
    "tool_calling": "draco_ray.rollout.tool_agent:ToolAgent",
    "verifiers": "draco_ray.verifiers.agent:VerifiersAgent",
}
"""Built-in agents by their name in ``agent.use``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to play."""

    task_id: str
    group: str
    rollout: int
    """Index in the group; in an evaluation, the run."""
    attempt: int
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        """The fields by which `Trajectory` names its rollout."""
        return {name: getattr(self, name) for name in ("task_id", "group", "rollout", "attempt")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """A turn of the policy."""

    text: str
    """The decoded turn, without the end-of-turn token."""
    cut: bool
    """Whether a length limit ended the turn."""
    opens_thinking: bool = False
    """Whether the chat template already opened its reasoning."""
    too_long: bool = False
    """Whether the turn exceeds the response's token limit, so that it is not acted on."""
    error: str | None = None
    """Why there is no turn; None if there is one."""
    tool_use: ParsedToolCalls | None = None
    """Its tool calls if the prompt lists tools (`draco_ray.records.TOOLS`); None also for a truncated turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """The tokens of a conversation, with field names as in `Trajectory`, and its usage."""

    token_ids_T: IntArray
    sampled_T: BoolArray
    logprob_T: FloatArray
    step_T: IntArray
    prompt_length: int
    policy_version: int
    usage: Usage


class Conversation(Protocol):
    """The conversation of one episode with a policy."""

    async def sample(self) -> PolicyTurn:
        """Sample the policy's next turn."""
        ...

    def record_turn(self, step: int) -> tuple[int, int]:
        """Record the sampled turn as ``step`` (from 0), or as `GAP`.

        Returns: the positions of its first token and after its last token.
        """
        ...

    def append_observation(self, observation: str) -> bool:
        """Append an observation; returns False if it exceeds the response's token limit."""
        ...

    def append_results(self, results: Sequence[str]) -> bool:
        """Append the results of the turn's calls, in order; returns False as `append_observation` does."""
        ...

    def token_record(self) -> TokenRecord:
        """The recorded tokens and usage."""
        ...


class Policy(Protocol):
    """A source of samples: an engine of this run, or an API."""

    @property
    def name(self) -> str:
        """Name recorded with its rollouts."""
        ...

    def begin(self, prompt: tuple[Message, ...], request: RolloutRequest) -> Conversation:
        """Begin an episode with ``prompt``."""
        ...


class Agent(Protocol):
    """Plays episodes. The constructor gets a `Policy`, the `AgentConfig`, and the text of the prompt template."""

    def __init__(self, policy: Policy, config: AgentConfig, template: str) -> None: ...

    def prompt(self, task: Task) -> tuple[Message, ...]:
        """The first messages of an episode."""
        ...

    async def run(self, world: World, request: RolloutRequest) -> Trajectory:
        """Play one episode. Returns a trajectory however the episode ends, even if the world crashes.

        Raises: what the policy raises.
        """
        ...


def find_agent(use: str) -> type[Agent]:
    """The class that ``agent.use`` names. Raises: ConfigError."""
    kind: type[Agent] = find_component("agent.use", use, AGENTS)
    return kind


def end_of(crash: EnvironmentCrashed) -> EpisodeEnd:
    """The end of an episode whose world was lost."""
    return EpisodeEnd.CRASHED if isinstance(crash, WorldBroken) else EpisodeEnd.SERVER_ERROR
