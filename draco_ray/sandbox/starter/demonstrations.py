"""Demonstrations: the sandbox's scripts with random faults, executed in AppWorld, recorded by the agent loop itself."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokens
from draco_ray.engine.sampler import Sample
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.environments.base import WorldVerdict
from draco_ray.records import Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest, agent_template, fill_agent_prompt
from draco_ray.rollout.code_block import cut_output
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from draco_ray.sandbox.scripted import run_scripts
from draco_ray.sandbox.world.scripts import Family, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A scripted rollout of one task."""

    task: Task
    wordings: tuple[str, ...]
    """All wordings of the task's family."""
    cells: tuple[str, ...]
    """The code of its turns."""
    outputs: tuple[str, ...] = ()
    """What AppWorld printed for each cell, not truncated; empty before execution."""


def draw(
    tasks: Sequence[tuple[Task, Family]], variants: int, fault_rates: Mapping[Fault, float], seed: int
) -> list[Demonstration]:
    """``variants`` scripts of every task, each with some of its family's faults.

    Every fault is drawn on its own by systematic sampling, so each task has its rate of it up to one script. Were the
    draws independent, a policy of this size would learn that some tasks are always left unfinished.
    """
    rng = random.Random(f"starter/{seed}")
    total = len(tasks) * variants
    # In the order of the enumeration: a set's order is not reproducible.
    drawn = {fault: _systematic(fault_rates.get(fault, 0.0), total, variants, rng) for fault in Fault}
    demonstrations = []
    for index in range(total):
        task, family = tasks[index // variants]
        faults = {fault for fault in family.faults if drawn[fault][index]}
        cells = family.script(frozenset(faults))
        demonstrations.append(Demonstration(task=task, wordings=family.wordings, cells=tuple(cells)))
    return demonstrations


def _systematic(rate: float, total: int, block: int, rng: random.Random) -> list[bool]:
    """``total`` draws of which every ``block`` in a row hold ``rate`` of them, rounded up or down, at random places."""
    start = rng.random()
    draws = [math.floor((index + 1) * rate + start) > math.floor(index * rate + start) for index in range(total)]
    shuffled: list[bool] = []
    for first in range(0, total, block):
        shuffled += rng.sample(draws[first : first + block], min(block, total - first))
    return shuffled


def execute(demonstrations: Sequence[Demonstration], world: Path, processes: int) -> list[Demonstration]:
    """Run every demonstration's cells in AppWorld, without ground truth (`run_scripts`). Raises: WorldError."""
    scripts = [(each.task.task_id, each.cells) for each in demonstrations]
    done = run_scripts(scripts, world, processes)
    return [replace(each, outputs=executed.outputs) for each, executed in zip(demonstrations, done, strict=True)]


def turn_texts(demonstration: Demonstration, closing: str) -> list[str]:
    """What the policy writes: one code block per turn, and the closing turn."""
    return [*(f"<code>\n{cell}\n</code>" for cell in demonstration.cells), closing]


def texts(demonstration: Demonstration, agent: AgentConfig, closing: str) -> list[str]:
    """All text of a demonstration as the policy would read or write it, for the tokenizer to learn from."""
    prompt = [message.content for message in fill_agent_prompt(_template(agent), demonstration.task)]
    outputs = [cut_output(output, agent.max_output_characters) for output in demonstration.outputs]
    # The template's own words are text to the tokenizer as well.
    return [*prompt, *turn_texts(demonstration, closing), *outputs, "\n", "system\n", "user\n", "assistant\n"]


def reword(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    """The same task in another wording of its family, with the same parameters.

    Raises: ValueError if no wording of the family made the instruction.
    """
    for wording in demonstration.wordings:
        # Placeholders become groups; everything else must stand there as it is.
        pieces = re.split(r"\{(\w+)\}", wording)
        pattern = "".join(f"(?P<{piece}>.+?)" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))
        if match := re.fullmatch(pattern, demonstration.task.instruction):
            instruction = rng.choice(demonstration.wordings).format(**match.groupdict())
            return replace(demonstration, task=replace(demonstration.task, instruction=instruction))
    raise ValueError(f"task {demonstration.task.task_id}: {demonstration.task.instruction!r} fits no wording")


async def record(
    demonstration: Demonstration, tokenizer: Any, chat: ChatTokens, agent: AgentConfig, closing: str
) -> Trajectory:
    """The trajectory the agent loop records when a policy says exactly this and AppWorld answers exactly that."""
    lines = turn_texts(demonstration, closing)
    sampler = _Script([[*tokenizer.encode(line, add_special_tokens=False), chat.end_of_turn_id] for line in lines])
    request = RolloutRequest(task_id=demonstration.task.task_id, group="demonstrations", rollout=0, attempt=0, seed=0)
    player = CodeAgent(TokenPolicy(sampler, chat, agent), agent, _template(agent))
    return await player.run(_Recording(demonstration), request)


def _template(agent: AgentConfig) -> str:
    return agent_template(agent.prompt, AppWorldEnvironment.agent_prompt)


class _Script:
    """A sampler that returns the turns of a script, one per call."""

    name = "script"

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = iter(turns)

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        """The next turn, cut at ``max_tokens`` as an engine would."""
        turn = next(self._turns)
        return Sample(
            token_ids=turn[:max_tokens],
            logprobs=[0.0] * len(turn[:max_tokens]),
            finish_reason="stop" if len(turn) <= max_tokens else "length",
            policy_version=0,
        )

    async def read_calls(self, text: str, tools: str, *, parser: str | None, thinking: bool) -> None:
        """Nothing: the turns are code."""


class _Recording:
    """A stand-in environment that replays recorded outputs."""

    def __init__(self, demonstration: Demonstration) -> None:
        self.task = demonstration.task
        self._outputs = iter(demonstration.outputs)

    async def act(self, action: str) -> str:
        """What the next cell printed."""
        return next(self._outputs)

    async def evaluate(self) -> WorldVerdict:
        """Not needed: a recording is never evaluated."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to close."""
