"""Context lengths of judges, and the length of the longest prompt: the union phase's, with all rollouts of a group.

The length is an upper estimate for full-length rollouts, in tokens of the policy. Texts that are limited in characters,
or written by the judge, are counted at `CHARACTERS_PER_TOKEN`. `draco_ray.judging.shortening` truncates prompts that do
not fit.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draco_ray.config.load import project_file
from draco_ray.config.schema import LOCAL_PROVIDER, DracoConfig, JudgeConfig
from draco_ray.engine.model_config import PUBLIC_CONFIGS
from draco_ray.judging.labels import examples_of
from draco_ray.judging.phases import Credit, Union
from draco_ray.judging.tokens import model_limit

CHARACTERS_PER_TOKEN = 3
"""Characters counted as one token; low for English, code and JSON, so that the token counts are upper estimates."""
QUOTED_REPLY_CHARACTERS = 20_000
"""Maximum length of the unusable reply that is quoted when the judge is asked again, in characters."""
LEAST_ROOM = 700
"""Minimum room for a prompt in tokens, however small the judge's context."""
CRITERION_TOKENS = 256
"""Tokens counted for each criterion and its JSON; the static rubric's criteria have 172 each."""
TURN_TOKENS = 32
"""Tokens of the headings of a turn and its output, and of thinking tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """Length of each part of the longest request to the judge, in tokens."""

    shows: str
    """Description of the request."""

    instructions: int
    """Tokens of the template and the examples, and twice those of the agent's prompt."""
    rollouts: int
    """Tokens of a group's rollouts; the last output of each may exceed its maximum response length."""
    criteria: int
    reply: int
    """Tokens of the reply (``judge.max_tokens``) and of unusable replies, which are quoted in the next request."""

    @property
    def tokens(self) -> int:
        """The sum of the parts."""
        return self.instructions + self.rollouts + self.criteria + self.reply

    def __str__(self) -> str:
        """The sum and its parts."""
        return (
            f"{self.tokens:,} tokens (rollouts {self.rollouts:,}, criteria {self.criteria:,}, instructions "
            f"{self.instructions:,}, reply {self.reply:,})"
        )


def judge_context(config: DracoConfig) -> JudgeContext:
    """The longest request with every rollout at full length.

    With a static rubric there is no union; the longest request is a credit call, whose template may show its rollout
    twice.

    Raises: ConfigError: the prompt set or its examples are missing.
    """
    agent, judge, group = config.agent, config.judge, config.algorithm.group_size
    dynamic = config.algorithm.rubric == "dynamic"
    longest = Union if dynamic else Credit
    template = project_file(judge.prompts / longest.template).read_text(encoding="utf-8")
    rollout = agent.max_response_length + agent.max_turns * TURN_TOKENS + _tokens(agent.max_output_characters)
    # The credit prompt shows each criterion with the scoring call's text about it.
    criteria = (
        judge.max_stage1_criteria + group * judge.max_stage2_criteria if dynamic else 2 * judge.max_union_criteria
    )
    return JudgeContext(
        shows=f"the union prompt contains all {group} rollouts of a group"
        if dynamic
        else "a credit prompt contains one rollout",
        instructions=_tokens(len(template) + len(examples_of(judge))) + 2 * agent.max_prompt_length,
        rollouts=(group if dynamic else 2) * rollout,
        criteria=criteria * CRITERION_TOKENS,
        reply=judge.max_tokens + judge.reasks * _tokens(QUOTED_REPLY_CHARACTERS),
    )


def judge_context_length(judge: JudgeConfig) -> int | None:
    """Context length of a judge in tokens; None if unknown.

    For a self-judge only the configured value counts, because its engines are sized for the prompts.
    """
    if judge.context_tokens is not None or judge.self_judge.enabled:
        return judge.context_tokens
    if judge.local.enabled:
        return judge.local.context_tokens or model_positions(judge.model.removeprefix(LOCAL_PROVIDER))
    # At a private endpoint the name does not tell how the model is served.
    return None if judge.api_base else model_limit(judge.model, "max_input_tokens")


def max_judge_prompt_tokens(judge: JudgeConfig) -> int | None:
    """Maximum length of a prompt in tokens that leaves room for reply and quoted replies; None if unknown."""
    # Fallbacks get the same prompt.
    others = (model_limit(each.model, "max_input_tokens") for each in judge.fallbacks if each.api_base is None)
    known = [tokens for tokens in (judge_context_length(judge), *others) if tokens is not None]
    if not known:
        return None
    return max(min(known) - judge.max_tokens - judge.reasks * _tokens(QUOTED_REPLY_CHARACTERS), LEAST_ROOM)


def self_judge_context_length(config: DracoConfig) -> int:
    """Context length of the engines of a self-judged run, in tokens.

    Raises: ConfigError: the prompt set is missing.
    """
    return config.judge.self_judge.context_tokens or judge_context(config).tokens


def uses_self_judge(config: DracoConfig) -> bool:
    """Whether the policy is its own judge in this run."""
    return config.judge.self_judge.enabled and config.algorithm.reward == "rubric"


def context_problem(config: DracoConfig, positions: int | None) -> str | None:
    """Why the model's context is too short for a self-judge, and what to change; None if it is long enough.

    Args:
        positions: context length of the model in tokens; None if unknown.
    """
    if not uses_self_judge(config) or positions is None:
        return None
    given, needed = config.judge.self_judge.context_tokens, judge_context(config)
    if self_judge_context_length(config) <= positions:
        return None
    if given is not None:
        return f"judge.self_judge.context_tokens={given:,}, but {config.model.path} accepts only {positions:,} tokens"
    return (
        f"self-judge: {needed.shows}; the longest request has {needed}, but {config.model.path} accepts "
        f"{positions:,}; choose a "
        "model with a longer context, or lower "
        f"agent.max_response_length ({config.agent.max_response_length:,}), algorithm.group_size or judge.max_tokens; "
        "with judge.self_judge.context_tokens set, longer prompts are cut"
    )


def model_positions(path: str, config_file: Path | None = None) -> int | None:
    """Context length of the model of `model.path` by its ``config.json``, in tokens; None if unknown.

    Args:
        path: a model directory, or the name of one of `PUBLIC_CONFIGS`.
        config_file: its ``config.json``, if ``path`` is neither.
    """
    if config_file is None and Path(path).expanduser().is_dir():
        config_file = Path(path).expanduser() / "config.json"
    config: Any = PUBLIC_CONFIGS.get(path)
    if config_file is not None:
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config") or config
    positions, rope = text.get("max_position_embeddings"), text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(positions, int):
        return None
    if rope.get("rope_type", rope.get("type")) == "yarn":
        return math.floor(rope.get("original_max_position_embeddings", positions) * rope.get("factor", 1))
    return positions


def _tokens(characters: int) -> int:
    return math.ceil(characters / CHARACTERS_PER_TOKEN)
