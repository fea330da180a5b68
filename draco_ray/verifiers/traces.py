"""Converts verifiers' traces to a trajectory, with tokens and the policy's log-probs and versions.

A trace is a graph of messages, each with the tokens it adds to the sequence. A message that the endpoint
(`TokenEpisode`) recorded as sampled by the policy extends the branch whose last turn it continues; otherwise it opens a
new branch, in which the earlier messages are context. So every sampled token is trained on once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.tool_calls import after_reasoning
from draco_ray.records import PROGRAM, TOOLS, EpisodeEnd, Message, Trajectory, Turn, Usage, is_step
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.code_block import cut_output, numbered
from draco_ray.rollout.endpoint.token_episode import Sampled, TokenEpisode
from draco_ray.rollout.endpoint.turns import is_side_call
from draco_ray.rollout.tokens import TokenPolicy, TokenSequence, beginnings, joined

Node = Mapping[str, Any]
Place = tuple[int, int]
"""Position of a node: index of its trace, and index in the trace."""


@dataclass(eq=False, kw_only=True)
class _Branch(TokenSequence):
    """The tokens of a path through a trace."""

    end: Place | None = None
    """Position of the branch's last turn."""


@dataclass(eq=False, kw_only=True)
class _Turn:
    """A turn of the trajectory, by the policy or another speaker."""

    branch: _Branch | None
    first: int
    last: int
    text: str
    role: str = "assistant"
    found: Sampled | None = None
    """The recorded sample; only for turns of the policy."""
    told: Sequence[str] = ()
    """The system and user messages before it; only for turns of the policy."""
    received: str = ""
    """The text that the harness received; only for turns of the policy."""
    calls: bool = False
    """Whether the turn calls tools."""
    answered: list[Node] = field(default_factory=list)
    """The messages that answer the turn."""
    answered_seconds: float = 0.0


def trajectory_of(
    traces: Sequence[Mapping[str, Any]],
    episode: TokenEpisode,
    *,
    request: RolloutRequest,
    policy: TokenPolicy,
    config: AgentConfig,
    prompt: tuple[Message, ...],
    ended: EpisodeEnd,
    error: str | None,
) -> Trajectory:
    """Convert the traces of an episode to a rollout (`draco_ray.verifiers.bridge` defines their format).

    Messages that the endpoint did not sample, and messages of agents and branches that verifiers does not train, are
    not turns of the policy: they are context, or turns with the role of their speaker.
    """
    graph = _Graph(traces, episode, policy, prompt)
    for place in graph.in_time():
        graph.add(place)
    offsets = dict(zip(graph.branches, beginnings(graph.branches), strict=True))
    turns: list[Turn] = []
    steps = 0
    for turn in graph.turns:
        offset = offsets[turn.branch] if turn.branch is not None else 0
        step = graph.is_step(turn, config)
        if step and turn.branch is not None:
            turn.branch.steps[turn.first : turn.last] = [steps] * (turn.last - turn.first)
            steps += 1
        number = graph.branches.index(turn.branch) if turn.branch is not None else 0
        turns.append(_record(turn, number, offset, step, policy, config))
    turns.append(_closing(traces, error))
    said = [turn.found for turn in graph.turns if turn.found is not None]
    first = next((turn.first for turn in graph.turns if turn.found is not None), 0)
    return Trajectory(
        **request.identity,
        policy_version=min((each.sample.policy_version for each in said), default=0),
        prompt=prompt,
        turns=tuple(turns),
        **joined(graph.branches),
        prompt_length=first,
        ended=ended,
        started_at=episode.started_at,
        ended_at=time.time(),
        error=error,
        engine=policy.name,
        usage=Usage(
            calls=len(said),
            input_tokens=sum(turn.first for turn in graph.turns if turn.found is not None),
            output_tokens=sum(len(each.sample.token_ids) for each in said),
        ),
        branches=tuple(offsets.values()) or (0,),
    )


class _Graph:
    """Builds branches and turns from an episode's traces."""

    def __init__(
        self,
        traces: Sequence[Mapping[str, Any]],
        episode: TokenEpisode,
        policy: TokenPolicy,
        prompt: tuple[Message, ...],
    ) -> None:
        self.branches: list[_Branch] = []
        self.turns: list[_Turn] = []
        self._traces, self._episode, self._policy = traces, episode, policy
        self._own: dict[Place, _Turn] = {}
        self._shown: set[Place] = set()
        self._told = "\n".join(message.content for message in prompt)
        self._tools: set[str] = set()

    def in_time(self) -> list[Place]:
        """All sampled messages in order of time."""
        places = [
            (t, n) for t, trace in enumerate(self._traces) for n, node in enumerate(trace["nodes"]) if node["sampled"]
        ]
        return sorted(places, key=lambda place: (self._node(place)["at"], place))

    def add(self, place: Place) -> None:
        """Add the next turn, by the policy or another speaker."""
        trace, node = self._traces[place[0]], self._node(place)
        way = self._way(place)
        ids = [token for each in way for token in self._node(each)["tokens"]]
        found = self._episode.find(ids) if trace["trainable"] and node["trained"] and node["tokens"] else None
        if found is None:
            self._show(place, role=str(trace["agent"]), branch=None)
            return
        since, before = self._since(way)
        own = before is not None and self._own[before].branch is not None
        branch = self._own[before].branch if own and before is not None else None
        grows = branch is not None and branch.end == before
        if branch is None or not grows:
            branch = _Branch()
            self.branches.append(branch)
            self._open(way[:-1], branch)
        elif before is not None:
            # The messages between the two turns were not sampled by the policy.
            self._own[before].answered = [self._node(each) for each in since[:-1]]
            self._own[before].answered_seconds = node["at"] - found.seconds - self._node(before)["at"]
            self._shown.update(since[:-1])
        count = len(found.sample.token_ids)
        branch.add(ids[len(branch.ids) : len(ids) - count])
        first, last = branch.add(found.sample.token_ids, found.sample.logprobs)
        branch.end = place
        text = self._policy.chat.text(found.sample.token_ids)
        turn = _Turn(branch=branch, first=first, last=last, text=text, found=found)
        turn.received, turn.calls = str(node["text"]), bool(node["calls"])
        turn.told = [str(each["text"]) for each in map(self._node, way[:-1]) if each["role"] in ("system", "user")]
        self._own[place] = turn
        self._shown.add(place)
        self.turns.append(turn)

    def is_step(self, turn: _Turn, config: AgentConfig) -> bool:
        """Whether a turn is a step of the policy; call it once all turns are added."""
        if turn.found is None or is_side_call(config.side_calls, turn.told):
            return False
        last = next(each for each in reversed(self.turns) if each.found is not None)
        message = "" if turn is last and config.closing_turn == "gap" else turn.received
        return is_step(acts=turn.calls, message=message, answered=bool(turn.answered))

    def _open(self, way: Sequence[Place], branch: _Branch) -> None:
        """Add the messages that open a branch; those shown before are only counted."""
        tools = self._node(way[0])["tools"] if way else []
        if tools and (listed := json.dumps(tools, ensure_ascii=False)) not in self._tools:
            self._tools.add(listed)
            self.turns.append(_Turn(branch=branch, first=0, last=0, text=listed, role=TOOLS))
        old = sum(place in self._shown for place in way)
        if old:
            text = f"({old} messages as before)"
            self.turns.append(_Turn(branch=branch, first=0, last=0, text=text, role="context"))
        for place in way:
            self._show(place, role=None, branch=branch)

    def _show(self, place: Place, *, role: str | None, branch: _Branch | None) -> None:
        node = self._node(place)
        if place in self._shown:
            return
        self._shown.add(place)
        text = _text(node)
        # The task is already in the prompt.
        if role is None and text.strip() in self._told:
            return
        said_by = role or ("earlier assistant" if node["role"] == "assistant" else str(node["role"]))
        # Only turns sampled by the policy are the agent's.
        said_by = "other agent" if said_by == "assistant" else said_by
        self.turns.append(_Turn(branch=branch, first=0, last=0, text=text, role=said_by))

    def _since(self, way: Sequence[Place]) -> tuple[Sequence[Place], Place | None]:
        """The part of a path after the policy's last turn on it, and that turn."""
        for index in range(len(way) - 2, -1, -1):
            if way[index] in self._own:
                return way[index + 1 :], way[index]
        return way, None

    def _way(self, place: Place) -> list[Place]:
        """The path from the root to a node, inclusive."""
        way = []
        at: int | None = place[1]
        while at is not None:
            way.append((place[0], at))
            at = self._node((place[0], at))["parent"]
        return way[::-1]

    def _node(self, place: Place) -> Node:
        node: Node = self._traces[place[0]]["nodes"][place[1]]
        return node


def _record(turn: _Turn, branch: int, offset: int, step: bool, policy: TokenPolicy, config: AgentConfig) -> Turn:
    if turn.found is None:
        text = turn.text if turn.role == TOOLS else cut_output(turn.text, config.max_output_characters)
        return Turn(
            text=text,
            action=None,
            observation=None,
            first_token=offset,
            last_token=offset,
            role=turn.role,
            branch=branch,
        )
    observation = None
    if step and turn.answered:
        names = [str(node["name"] or node["role"]) for node in turn.answered]
        observation = cut_output(numbered(names, [*map(_text, turn.answered)]), config.max_output_characters)
    # As at the endpoint, a text that was answered may be an action.
    action = None
    if step and (turn.calls or turn.answered):
        action = after_reasoning(turn.text, thinking=policy.chat.opens_thinking).strip() or turn.text
    return Turn(
        text=turn.text,
        action=action,
        observation=observation,
        first_token=offset + turn.first,
        last_token=offset + turn.last,
        seconds_generating=turn.found.seconds,
        seconds_executing=max(0.0, turn.answered_seconds),
        branch=branch,
        policy_version=turn.found.sample.policy_version,
        message=step and action is None,
    )


def _text(node: Node) -> str:
    calls = [json.dumps(call, ensure_ascii=False) for call in node["calls"]]
    return "\n".join(filter(None, [str(node["text"]), *calls]))


def _closing(traces: Sequence[Mapping[str, Any]], error: str | None) -> Turn:
    """The last turn, which reports how the episode ended."""
    stops = [f"{trace['agent']}: {trace['stop']}" for trace in traces if trace["stop"]]
    text = "\n".join(["The episode has ended.", *stops, *filter(None, [error])])
    return Turn(text=text, action=None, observation=None, first_token=0, last_token=0, role=PROGRAM)
