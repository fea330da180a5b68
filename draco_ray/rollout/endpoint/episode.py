"""One episode behind the endpoint: which recorded tokens a request goes on from, and the trajectory they all make.

A request whose messages begin with those of an earlier turn, that turn included, goes on from the tokens recorded up to
there: only what came since is put into tokens. Where that turn was the last of its branch the branch grows; otherwise,
or where no recorded turn fits, the request opens a branch. What a new branch takes over from another is context in it,
so every sampled token is trained on once.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.engine.tool_calls import ToolCall, ToolUse, after_reasoning
from draco_ray.errors import ConfigError
from draco_ray.records import GAP, PROGRAM, TOOLS, EpisodeEnd, Message, Task, Trajectory, Turn, Usage, is_step
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.code_block import cut_output
from draco_ray.rollout.endpoint.turns import Refused, TurnReply, TurnRequest, identity, no_turn_left, room_left
from draco_ray.rollout.tokens import TokenPolicy, turn_seed

_NO_TOOLS = "[]"


@dataclass(kw_only=True, eq=False)
class _Turn:
    """One turn of the policy."""

    branch: _Branch
    ids: list[int]
    first: int
    """Of its tokens in the branch."""
    heard: int
    """Messages of the conversation up to it, itself included."""
    text: str
    use: ToolUse | None
    side_call: bool
    opening: Sequence[Mapping[str, Any]]
    """What its request said that no branch had said before; for the first turn of a branch."""
    seconds: float
    policy_version: int
    at: float
    """Monotonic seconds when it was there."""
    call_ids: frozenset[str] = frozenset()
    answered: Sequence[Mapping[str, Any]] | None = None
    """What its agent came back with."""
    answered_at: float = 0.0

    @property
    def last(self) -> int:
        """The position behind its last token in the branch."""
        return self.first + len(self.ids)

    @property
    def called(self) -> bool:
        """Whether it called tools."""
        return self.use is not None and self.use.problem is None


@dataclass(kw_only=True, eq=False)
class _Branch:
    """One token sequence; its lists are only ever appended to."""

    tools: str
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    """The identities of the messages that its tokens say."""
    turns: list[_Turn] = field(default_factory=list)
    busy: bool = False
    """A request that goes on from its end is under way."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Append tokens; without log-probs they were not sampled."""
        self.ids += ids
        self.sampled += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


class Episode:
    """What one agent asks for while it does one task."""

    def __init__(
        self,
        task: Task,
        request: RolloutRequest,
        policy: TokenPolicy,
        config: AgentConfig,
    ) -> None:
        """Begin with at most ``max_turns`` turns, and ``max_prompt_length + max_response_length`` tokens a branch."""
        self.key = secrets.token_urlsafe(24)
        self.name = f"{request.task_id}/{request.rollout}"
        self.open = True
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the policy raised."""
        # It counts as read even where nobody waits for it.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self.refused: EpisodeEnd | None = None
        """The limit that the last request ran into."""
        self.complaint: str | None = None
        """Why the last request that got no answer got none."""
        self.stored: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Id of a response -> the conversation up to it, for requests that go on from an id."""
        self._task, self._request = task, request
        self._policy, self._chat, self._config = policy, policy.chat, config
        self._branches: list[_Branch] = []
        self._turns: list[_Turn] = []
        self._asked = 0
        self._said: set[str] = set()
        self._without_stop: dict[str, str] = {}
        """Identity of a turn that a stop text has ended, with that text -> as its agent got it."""
        self._cached = 0
        self._started_at = time.time()

    @property
    def turns(self) -> int:
        """The policy's turns so far."""
        return len(self._turns)

    async def answer(self, ask: TurnRequest) -> TurnReply:
        """Have the policy take its turn in the conversation of a request.

        Raises: Refused; and whatever the policy raises.
        """
        if self._asked >= self._config.max_turns:
            self.refused = EpisodeEnd.TURN_LIMIT
            raise no_turn_left(self._config)
        heard, began = [self._identity(message) for message in ask.messages], time.monotonic()
        turn = self._longest(heard, ask.tools)
        branch, ids = self._tokens(ask, turn)
        self._attach_results(ask, turn, began)
        opening = self._opening(ask, turn, branch)
        if turn is not None and turn.answered is None:
            # Also where what follows does not fit: it is what came of the turn.
            turn.answered, turn.answered_at = ask.messages[turn.heard :], began
        try:
            room = room_left(self._config, len(ids))
        except Refused:
            self.refused = EpisodeEnd.RESPONSE_LIMIT
            raise
        self.refused = None
        self._asked += 1
        limits = (room, ask.max_tokens, self._config.max_turn_tokens)
        seed = turn_seed(self._request.seed, self._asked)
        branch.busy = True
        try:
            sample = await self._policy.sampler.sample(ids, max_tokens=min(each for each in limits if each), seed=seed)
            sample = self._stopped(sample, ask.stop)
            text, use = self._chat.text(sample.token_ids), None
            if sample.finish_reason == "stop" and ask.tools != _NO_TOOLS:
                use = await self._policy.read_calls(text, ask.tools)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            branch.busy = False
        if not self.open:
            raise Refused("this episode has ended", status=410, code="episode_over")
        self._keep(branch, ids, sample)
        said = _Turn(
            branch=branch,
            ids=sample.token_ids,
            first=len(branch.ids) - len(sample.token_ids),
            heard=len(heard) + 1,
            text=text,
            use=use,
            side_call=ask.side_call or self._is_side_call(ask.messages),
            opening=opening,
            seconds=time.monotonic() - began,
            policy_version=sample.policy_version,
            at=time.monotonic(),
        )
        self._said.update((*heard, ask.tools))
        branch.turns.append(said)
        self._turns.append(said)
        cached = turn.last if turn else 0
        self._cached += cached
        answer = self._answer(said, sample, ask.stop, len(ids), cached)
        said.call_ids = frozenset(each for each, _ in answer.calls)
        branch.heard = [*heard, identity(answer.message())]
        if answer.stopped_by:
            # Many agents put it back where they want it.
            whole = {**answer.message(), "content": answer.content + answer.stopped_by}
            self._without_stop[identity(whole)] = branch.heard[-1]
        self._said.add(branch.heard[-1])
        return answer

    def count(self, ask: TurnRequest) -> int:
        """Tokens of a request. Raises: Refused where the chat template refuses its messages."""
        return len(self._tokens(ask, self._longest([self._identity(each) for each in ask.messages], ask.tools))[1])

    def trajectory(
        self, ended: EpisodeEnd, error: str | None, *, prompt: tuple[Message, ...], closing: str
    ) -> Trajectory:
        """Everything that was sampled, as one rollout; nothing is sampled after it.

        Args:
            closing: what is to be said of the agent's program, as the last turn.
        """
        self.open = False
        offsets = dict(
            zip(self._branches, np.cumsum([0, *(len(each.ids) for each in self._branches)]).tolist(), strict=False)
        )
        turns: list[Turn] = []
        steps = 0
        step_T = np.full(sum(len(branch.ids) for branch in self._branches), GAP, dtype=np.int32)
        for turn in self._turns:
            number, offset = self._branches.index(turn.branch), offsets[turn.branch]
            turns += [_context(each, number, offset + turn.first, self._config) for each in turn.opening]
            step = self._is_step(turn)
            if step:
                step_T[offset + turn.first : offset + turn.last] = steps
                steps += 1
            turns.append(self._record(turn, number, offset, step))
            spoken = [message for message in turn.answered or () if message["role"] != "tool"]
            turns += [_context(each, number, offset + turn.last, self._config) for each in spoken]
        if closing:
            turns.append(Turn(text=closing, action=None, observation=None, first_token=0, last_token=0, role=PROGRAM))
        usage = Usage(
            calls=len(self._turns),
            input_tokens=sum(turn.first for turn in self._turns),
            cached_tokens=self._cached,
            output_tokens=sum(len(turn.ids) for turn in self._turns),
        )
        return Trajectory(
            task_id=self._task.task_id,
            group=self._request.group,
            rollout=self._request.rollout,
            attempt=self._request.attempt,
            policy_version=min((turn.policy_version for turn in self._turns), default=0),
            prompt=prompt,
            turns=tuple(turns),
            token_ids_T=np.array([token for branch in self._branches for token in branch.ids], dtype=np.int32),
            sampled_T=np.array([flag for branch in self._branches for flag in branch.sampled], dtype=np.bool_),
            logprob_T=np.array([value for branch in self._branches for value in branch.logprobs], dtype=np.float32),
            step_T=step_T,
            prompt_length=self._turns[0].first if self._turns else 0,
            ended=ended,
            started_at=self._started_at,
            ended_at=time.time(),
            error=error,
            engine=self._policy.name,
            usage=usage,
            branches=tuple(offsets.values()) or (0,),
        )

    def _attach_results(self, ask: TurnRequest, continued: _Turn | None, began: float) -> None:
        """Give turns their tool results where a rewritten history brings both."""
        for turn in self._turns:
            if turn is continued or turn.answered is not None or not turn.call_ids:
                continue
            results = [each for each in ask.messages if each.get("tool_call_id") in turn.call_ids]
            if results:
                turn.answered, turn.answered_at = results, began
                self._said.update(map(self._identity, results))

    def _longest(self, heard: Sequence[str], tools: str) -> _Turn | None:
        """The turn up to which most of a conversation is recorded; of several the latest."""
        found: _Turn | None = None
        for branch in self._branches:
            if branch.tools != tools:
                continue
            for turn in branch.turns:
                longer = found is None or turn.heard >= found.heard
                if longer and turn.heard <= len(heard) and branch.heard[: turn.heard] == list(heard[: turn.heard]):
                    found = turn
        return found

    def _tokens(self, ask: TurnRequest, turn: _Turn | None) -> tuple[_Branch, list[int]]:
        """The branch that a request grows, or a new one, and all tokens up to the policy's turn."""
        try:
            if turn is None:
                return _Branch(tools=ask.tools), self._chat.conversation(ask.messages, json.loads(ask.tools))
            glue = self._chat.after_messages(turn.ids, turn.called, ask.messages[turn.heard :])
        except ConfigError as error:
            raise Refused(str(error), code="chat_template") from error
        branch = turn.branch
        ids = branch.ids[: turn.last] + glue
        at_its_end = turn is branch.turns[-1] and not branch.busy
        return (branch if at_its_end else _Branch(tools=ask.tools)), ids

    def _keep(self, branch: _Branch, ids: Sequence[int], sample: Sample) -> None:
        if not branch.turns:
            self._branches.append(branch)
        branch.add(ids[len(branch.ids) :], None)
        branch.add(sample.token_ids, sample.logprobs)

    def _stopped(self, sample: Sample, stop: Sequence[str]) -> Sample:
        """A turn up to the token with which the first of the agent's stop texts is complete."""
        if not any(each in self._chat.text(sample.token_ids) for each in stop):
            return sample
        low, high = 1, len(sample.token_ids)
        while low < high:
            middle = (low + high) // 2
            if any(each in self._chat.text(sample.token_ids[:middle]) for each in stop):
                high = middle
            else:
                low = middle + 1
        return Sample(
            token_ids=sample.token_ids[:low],
            logprobs=sample.logprobs[:low],
            finish_reason="stop",
            policy_version=sample.policy_version,
        )

    def _identity(self, message: Mapping[str, Any]) -> str:
        """`identity`, in which it does not matter whether a turn has the stop text that ended it."""
        found = identity(message)
        return self._without_stop.get(found, found)

    def _answer(self, turn: _Turn, sample: Sample, stop: Sequence[str], prompt_tokens: int, cached: int) -> TurnReply:
        """What the agent receives of a turn."""
        said = after_reasoning(turn.text, thinking=self._chat.opens_thinking)
        reasoning = turn.text.removesuffix(said).strip().removeprefix("<think>").removesuffix("</think>").strip()
        calls: tuple[tuple[str, ToolCall], ...] = ()
        if turn.use is not None and turn.called:
            said = said.partition(turn.use.text)[0]
            calls = tuple((f"call_{secrets.token_hex(12)}", call) for call in turn.use.calls)
        finish = "length" if sample.finish_reason == "length" else "tool_calls" if calls else "stop"
        end, stopped_by = min(((said.find(each), each) for each in stop if each in said), default=(len(said), ""))
        return TurnReply(
            # White space right before a stop text stays: the agent may continue from there.
            content=said[:end].lstrip() if stopped_by else said.strip(),
            reasoning=reasoning,
            calls=calls,
            finish_reason=finish,
            stopped_by=stopped_by,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
            completion_tokens=len(sample.token_ids),
        )

    def _opening(self, ask: TurnRequest, turn: _Turn | None, branch: _Branch) -> Sequence[Mapping[str, Any]]:
        """What a branch that this request opens is given and nobody has been told before; the rest is counted."""
        if turn is not None and (branch is turn.branch or turn.answered is None):
            return ()
        told = ask.messages[turn.heard if turn else 0 :]
        new = [message for message in told if self._identity(message) not in self._said]
        old = len(told) - len(new)
        counted = [{"role": "context", "content": f"({old} messages as before)"}] if old else []
        tools = [{"role": TOOLS, "content": ask.tools}] if ask.tools not in {_NO_TOOLS, *self._said} else []
        return [*tools, *counted, *new]

    def _is_side_call(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a rule of ``agent.side_calls`` matches the first or the last message of the system or user."""
        told = [str(each["content"]) for each in messages if each["role"] in ("system", "user")]
        return any(re.search(rule, text) for rule in self._config.side_calls for text in (*told[:1], *told[-1:]))

    def _is_step(self, turn: _Turn) -> bool:
        """Every turn here was sent to the agent's program, so its message was received."""
        if turn.side_call:
            return False
        message = after_reasoning(turn.text, thinking=self._chat.opens_thinking)
        if turn is self._turns[-1] and self._config.closing_turn == "gap":
            message = ""
        return is_step(acts=turn.called, message=message, answered=turn.answered is not None)

    def _record(self, turn: _Turn, branch: int, offset: int, step: bool) -> Turn:
        action = None
        # A text that the program answered may be an action in a form of its own: only one that it did not is a message.
        if step and (turn.called or turn.answered is not None):
            action = turn.use.text if turn.use is not None else turn.text
        observation = None
        if results := [message for message in turn.answered or () if message["role"] == "tool"]:
            observation = cut_output(_results(results, turn.use), self._config.max_output_characters)
        return Turn(
            text=turn.text,
            action=action,
            observation=observation,
            first_token=offset + turn.first,
            last_token=offset + turn.last,
            seconds_generating=turn.seconds,
            seconds_executing=max(0.0, turn.answered_at - turn.at) if turn.answered is not None else 0.0,
            branch=branch,
            policy_version=turn.policy_version,
            message=step and action is None,
        )


def _results(messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> str:
    """What the tools that a turn called have answered."""
    results = [str(message.get("content") or "") for message in messages]
    if len(results) == 1:
        return results[0]
    names = [call.name for call in use.calls] if use is not None else []
    numbered = enumerate(zip_longest(names[: len(results)], results, fillvalue="tool"), start=1)
    return "\n".join(f"({number}) {name}: {result}" for number, (name, result) in numbered)


def _context(message: Mapping[str, Any], branch: int, at: int, config: AgentConfig) -> Turn:
    """A message that opened a branch, or that a turn was answered with, as a turn of its speaker."""
    content = str(message.get("content") or "")
    if calls := message.get("tool_calls"):
        content = "\n".join([content, *(json.dumps(call["function"], ensure_ascii=False) for call in calls)]).strip()
    # A turn of the agent is one that the policy has sampled.
    role = "earlier assistant" if message["role"] == "assistant" else str(message["role"])
    text = content if role == TOOLS else cut_output(content, config.max_output_characters)
    return Turn(text=text, action=None, observation=None, first_token=at, last_token=at, role=role, branch=branch)
