"""Demonstrations: the sandbox's scripts with random faults, executed in AppWorld, as the agent loop records them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.records import Task
from draco_ray.rollout.agent import agent_template, fill_agent_prompt
from draco_ray.rollout.code_block import cut_output
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One demonstration of T tokens, as the agent loop would have recorded it."""

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    """True where the policy would have sampled the token: the loss mask."""


def draw_demonstrations(
    tasks: Sequence[tuple[Task, Family]], variants: int, fault_rates: Mapping[Fault, float], seed: int
) -> list[Demonstration]:
    """``variants`` scripts of every task, each with some of its family's faults.

    Each fault is drawn separately by systematic sampling, so that every task has it at its rate, up to one script. From
    independent draws, a policy of this size would learn that some tasks are always left unfinished.
    """
    rng = random.Random(f"starter/{seed}")
    total = len(tasks) * variants
    # Draw in the order of the enumeration, because a set's order is not reproducible.
    drawn = {fault: _systematic(fault_rates.get(fault, 0.0), total, variants, rng) for fault in Fault}
    demonstrations = []
    for index in range(total):
        task, family = tasks[index // variants]
        faults = {fault for fault in family.faults if drawn[fault][index]}
        cells = family.script(frozenset(faults))
        demonstrations.append(Demonstration(task=task, wordings=family.wordings, cells=tuple(cells)))
    return demonstrations


def _systematic(rate: float, total: int, block: int, rng: random.Random) -> list[bool]:
    """``total`` draws; a share ``rate`` of each ``block`` in a row is True, rounded up or down, at random places."""
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
    # The tokenizer also has to encode the chat template's own words.
    return [*prompt, *turn_texts(demonstration, closing), *outputs, "\n", "system\n", "user\n", "assistant\n"]


def reword(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    """The same task in another wording of its family, with the same parameters.

    Raises: ValueError if no wording of the family made the instruction.
    """
    for wording in demonstration.wordings:
        # Placeholders become groups; everything else must match literally.
        pieces = re.split(r"\{(\w+)\}", wording)
        pattern = "".join(f"(?P<{piece}>.+?)" if at % 2 else re.escape(piece) for at, piece in enumerate(pieces))
        if match := re.fullmatch(pattern, demonstration.task.instruction):
            instruction = rng.choice(demonstration.wordings).format(**match.groupdict())
            return replace(demonstration, task=replace(demonstration.task, instruction=instruction))
    raise ValueError(f"task {demonstration.task.task_id}: {demonstration.task.instruction!r} fits no wording")


def tokenize_demonstration(
    demonstration: Demonstration, chat: ChatTokenizer, agent: AgentConfig, closing: str
) -> Example:
    """The tokens that the agent loop records if policy and AppWorld write exactly the demonstration's texts."""
    ids = chat.prompt(fill_agent_prompt(_template(agent), demonstration.task))
    sampled = [False] * len(ids)
    turns = turn_texts(demonstration, closing)[: agent.max_turns]
    for index, turn in enumerate(turns):
        said = [*chat.tokenizer.encode(turn, add_special_tokens=False), chat.end_of_turn_id]
        told: list[int] = []
        if index < len(turns) - 1:
            told = chat.after_turn(said, cut_output(demonstration.outputs[index], agent.max_output_characters))
        ids += [*said, *told]
        sampled += [True] * len(said) + [False] * len(told)
    return Example(token_ids=tuple(ids), sampled=tuple(sampled))


def _template(agent: AgentConfig) -> str:
    return agent_template(agent.prompt, AppWorldEnvironment.agent_prompt)
