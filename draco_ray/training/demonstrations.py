"""Fine-tuning by `draco sft`. Demonstrations are conversations in a JSONL file, or a run's best rollouts.

Conversations are tokenized as an agent would record them in a rollout.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draco_ray.config.schema import AgentConfig, DracoConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.model_directory import save_tokenizer
from draco_ray.environments.base import Environment
from draco_ray.errors import ConfigError, WorldError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import TOOLS, Message, TrainingSample, Trajectory
from draco_ray.rollout.agent import Agent
from draco_ray.rollout.endpoint.fields import replace_surrogates, sort_tool_results
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import step_trajectories

OnUpdate = Callable[[int, int, float], None]
"""Called after every update with (updates done, total updates, cross-entropy before the update in nats per token)."""


def fine_tune(
    config: DracoConfig, samples: Sequence[TrainingSample], out: Path, *, epochs: int, on_update: OnUpdate
) -> float:
    """Fit an adapter on ``model.path`` to the samples and write the model with it merged in.

    Args:
        config: ``model``, ``learner`` (rank, learning rate, ``minibatch_prompts`` demonstrations per update) and
            ``seed``.
        samples: the demonstrations to imitate.
        out: a folder that does not exist yet, for model and tokenizer.
        epochs: number of passes over the samples.
        on_update: called after every update.
    Returns: the mean loss of the last epoch, nats per token, measured before each update.
    Raises: ConfigError when the model cannot be used.
    """
    plain = dict.fromkeys(("kl_coefficient", "entropy_coefficient"), 0.0)
    uncorrected = dict.fromkeys(("importance_cap", "mask_low", "mask_high"))
    device = "cuda" if torch.cuda.is_available() and config.learner.gpus_per_worker > 0 else "cpu"
    rate = {"learning_rate": config.learner.sft_learning_rate or config.learner.learning_rate}
    settings = config.learner.model_copy(update=plain | uncorrected | rate)
    learner = LoraLearner(config.model, settings, seed=config.seed, device=device)
    order = np.random.default_rng(config.seed)
    size = settings.minibatch_prompts
    total = epochs * -(-len(samples) // size)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        shuffled = [samples[index] for index in order.permutation(len(samples))]
        for first in range(0, len(shuffled), size):
            batch = shuffled[first : first + size]
            learner.accumulate(batch)
            metrics = learner.step()
            if metrics.skipped is not None:
                raise ConfigError(f"sft: update {metrics.update + 1} failed: {metrics.skipped}")
            # Mean distance of the learner's log-probs from the samples', which are 0: the cross-entropy.
            losses.append(metrics.engine_gap)
            on_update(metrics.update, total, losses[-1])
    merged = learner.policy.peft.merge_and_unload()
    merged.save_pretrained(out)
    save_tokenizer(config.model.path, out, config.model.chat_template)
    return float(np.mean(losses))


_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation whose assistant turns are to be imitated."""

    name: str
    """File and line, for error messages."""
    opening: tuple[Message, ...]
    """The messages before the first assistant turn."""
    rest: tuple[Mapping[str, Any], ...]
    """The other messages, in OpenAI's format."""


def read_demonstrations(path: Path, environment: Environment, agent: Agent) -> list[Demonstration]:
    """The demonstrations of a JSONL file: each line has ``messages`` and optionally ``tools``.

    If the first message is the assistant's, ``agent``'s prompt for the task with the line's ``id`` is inserted before
    it, so that demonstrations begin like rollouts.

    Raises: ConfigError: one line that names file and line.
    """
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: demonstrations cannot be read: {' '.join(str(error).split())}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_demonstration(f"{path}: line {number}", line, environment, agent))
    if not found:
        raise ConfigError(f"{path}: contains no demonstrations")
    return found


def _demonstration(name: str, line: str, environment: Environment, agent: Agent) -> Demonstration:
    try:
        # A lone surrogate, which JSON can encode, cannot be tokenized.
        row = replace_surrogates(json.loads(line))
        messages = row["messages"]
        roles = [message["role"] for message in messages]
        tools = row.get("tools") or []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{name}: expected an object with messages, each with a role ({error!r})") from None
    if not isinstance(tools, list) or not all(_named(tool) for tool in tools):
        raise ConfigError(f"{name}: tools: expected a list of schemas, each with a function that has a name")
    if row.get("functions"):
        raise ConfigError(f"{name}: functions: not supported; expected tools")
    messages = sort_tool_results([_with_calls(name, _in_texts(name, message)) for message in messages])
    if "assistant" not in roles:
        raise ConfigError(f"{name}: no assistant turn, so there is nothing to learn")
    if not any(message["role"] == "assistant" and _learned(message) for message in messages):
        raise ConfigError(f"{name}: every assistant turn has weight 0, so there is nothing to learn")
    first = roles.index("assistant")
    if first:
        opening = tuple(Message(role=each["role"], content=str(each.get("content") or "")) for each in messages[:first])
        if tools:
            opening = (Message(role=TOOLS, content=json.dumps(tools)), *opening)
    elif "id" not in row:
        raise ConfigError(
            f"{name}: begins with an assistant turn and has no id; expected the id of the task whose prompt comes "
            "before it"
        )
    else:
        try:
            opening = agent.prompt(environment.task(str(row["id"])))
        except WorldError as error:
            raise ConfigError(f"{name}: {error}") from None
    return Demonstration(name=name, opening=opening, rest=tuple(messages[first:]))


def _in_texts(name: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its content as one text; OpenAI's format also allows a list of parts."""
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise ConfigError(f"{name}: role {role!r}: expected one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"{name}: the content of a message has a part that is not text; expected only text")
        content = "\n".join(map(str, texts))
    if not isinstance(content, str | None):
        raise ConfigError(f"{name}: the content of a message: expected a text, found {type(content).__name__}")
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


def _with_calls(name: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its tool calls checked and their arguments parsed."""
    if message["role"] != "assistant":
        return message
    if message.get("function_call"):
        raise ConfigError(f"{name}: function_call: not supported; expected tool_calls")
    asked, calls = message.get("tool_calls") or [], []
    if not isinstance(asked, list) or not all(_named(call) for call in asked):
        raise ConfigError(f"{name}: tool_calls: expected a list of calls, each with a function that has a name")
    for call in asked:
        arguments = call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigError(f"{name}: the arguments of {call['function']['name']} are not a JSON object")
        calls.append({**call, "type": "function", "function": {**call["function"], "arguments": arguments}})
    if not calls and not str(message["content"]).strip():
        raise ConfigError(f"{name}: an assistant turn has neither text nor tool calls")
    if message.get("weight") not in (None, 0, 1):
        raise ConfigError(f"{name}: weight {message['weight']!r}: expected 1, or 0 for a turn without training loss")
    # Servers use different names for the reasoning text.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ConfigError(f"{name}: the reasoning of a turn: expected a text, found {type(reasoning).__name__}")
    return {**message, "tool_calls": calls, "reasoning_content": reasoning}


def _learned(message: Mapping[str, Any]) -> bool:
    """Whether a turn is to be imitated; with OpenAI's ``weight`` of 0 it is only context."""
    return message.get("weight") != 0


def _named(entry: Any) -> bool:
    """Whether ``entry`` is a tool call or a tool schema whose function has a name."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def as_sample(demonstration: Demonstration, chat: ChatTokenizer) -> TrainingSample:
    """The tokens that an agent would record if a policy wrote this conversation, with the imitated turns marked as
    sampled.

    Raises: ConfigError if the chat template cannot express the conversation.
    """
    turns = _turns(demonstration)
    try:
        ids = chat.prompt(demonstration.opening)
        prompt_length, sampled = len(ids), [False] * len(ids)
        for index, (message, answers) in enumerate(turns):
            turn, glue = chat.turn(message), []
            if index < len(turns) - 1:
                said = [{"role": each["role"], "content": str(each.get("content") or "")} for each in answers]
                names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
                # The text after a turn begins with its end token, which in some templates depends on the next message.
                end, *glue = chat.after_messages([], names, said)
                turn[-1] = end
            ids = ids + turn + glue
            sampled = sampled + [_learned(message)] * len(turn) + [False] * len(glue)
    except ConfigError as error:
        raise ConfigError(f"{demonstration.name}: {error}") from error
    return _sample(demonstration.name, 0, ids, sampled, prompt_length)


def _turns(demonstration: Demonstration) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Each assistant turn with the messages that follow it."""
    turns: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
    for message in demonstration.rest:
        if message["role"] == "assistant":
            if turns and not turns[-1][1]:
                raise ConfigError(f"{demonstration.name}: two assistant turns follow each other; merge them")
            turns.append((message, []))
        else:
            turns[-1][1].append(message)
    for message, answers in turns:
        calls, results = len(message.get("tool_calls") or ()), sum(answer["role"] == "tool" for answer in answers)
        # The conversation may end with tool calls that have no results.
        if answers and results != calls:
            raise ConfigError(
                f"{demonstration.name}: a turn with {calls} tool calls is followed by {results} tool results; "
                "expected one per call"
            )
    return turns


def filter_by_length(samples: Sequence[TrainingSample], agent: AgentConfig) -> tuple[list[TrainingSample], str | None]:
    """The samples that fit the length of a rollout, and a message about those that do not, if any.

    Raises: ConfigError if all are too long.
    """
    most = agent.max_prompt_length + agent.max_response_length
    long = [sample for sample in samples if len(sample.token_ids_T) > most]
    if not long:
        return list(samples), None
    said = (
        f"{len(long)} of {len(samples)} demonstrations are longer than agent.max_prompt_length + "
        f"agent.max_response_length = {most} tokens; the first, {long[0].group}, has {len(long[0].token_ids_T)}"
    )
    if len(long) == len(samples):
        raise ConfigError(f"{said}: raise these limits, or shorten the demonstrations")
    return [sample for sample in samples if len(sample.token_ids_T) <= most], f"left out: {said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRollouts:
    """The best rollouts of a run."""

    samples: tuple[TrainingSample, ...]
    """Training samples: one per branch of each rollout."""
    rollouts: int
    tasks: int
    seen: int
    """Number of rollouts that have a reward."""


def best_rollouts(run: RunDirectory, best: int) -> BestRollouts:
    """For every task, the ``best`` rollouts with the highest positive rewards; ties go to later rollouts.

    Raises: ConfigError if no rollout has a positive reward.
    """
    by_task: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    seen = 0
    for row in run.table("advantages").to_pylist():
        seen += 1
        if row["reward"] is not None and row["reward"] > 0:
            by_task[row["task_id"]].append((row["reward"], row["training_step"], row["rollout"]))
    wanted: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for task_id, found in by_task.items():
        for _, step, rollout in sorted(found, reverse=True)[:best]:
            wanted[step].add((task_id, rollout))
    samples = []
    for step in sorted(wanted):
        for task_id, trajectories in step_trajectories(run, step).items():
            for each in trajectories:
                if (task_id, each.rollout) in wanted[step] and each.sampled_T.any():
                    samples += [_branch(each, span) for span in each.branch_spans]
    if not samples:
        raise ConfigError(f"{run.path}: none of {seen} rollouts has a reward above 0, so there is nothing to learn")
    return BestRollouts(samples=tuple(samples), rollouts=sum(map(len, wanted.values())), tasks=len(by_task), seen=seen)


def _branch(trajectory: Trajectory, span: slice) -> TrainingSample:
    """One branch of a rollout; tokens shared with an earlier branch are context, as in training."""
    sampled = trajectory.sampled_T[span]
    prompt_length = trajectory.prompt_length if span.start == 0 else int(sampled.argmax())
    return _sample(
        trajectory.group, trajectory.rollout, trajectory.token_ids_T[span].tolist(), sampled.tolist(), prompt_length
    )


def _sample(
    group: str, rollout: int, ids: Sequence[int], sampled: Sequence[bool], prompt_length: int
) -> TrainingSample:
    """A sample with an advantage of 1 on all sampled tokens."""
    mask = np.array(sampled, dtype=np.bool_)
    return TrainingSample(
        group=group,
        task_id=group,
        rollout=rollout,
        policy_version=0,
        token_ids_T=np.array(ids, dtype=np.int32),
        loss_mask_T=mask,
        advantage_T=mask.astype(np.float32),
        logprob_T=np.zeros(len(mask), dtype=np.float32),
        prompt_length=prompt_length,
    )
