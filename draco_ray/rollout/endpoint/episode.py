"""One episode behind the endpoint: it matches requests to recorded tokens and builds the trajectory.

If a request's messages begin with the whole conversation up to and including a recorded turn, the request continues
that turn's tokens: only new messages are tokenized. If that turn was the last of its branch, the branch grows;
otherwise, or if no recorded turn matches, the request opens a branch. Tokens that a new branch copies from another
branch are context there, so every sampled token is trained on once.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from draco_ray.config.schema import AgentConfig
from draco_ray.engine.sampler import Sample
from draco_ray.engine.tool_calls import ParsedToolCalls, ToolCall, after_reasoning
from draco_ray.errors import ConfigError
from draco_ray.records import PROGRAM_ROLE, SIDE_CALL, TOOLS, EpisodeEnd, Message, Trajectory, Turn, Usage, is_step
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.code_block import cut_output, number_tool_results
from draco_ray.rollout.endpoint.turns import Refused, TurnReply, TurnRequest, is_side_call, message_key
from draco_ray.rollout.endpoint.world_tools import WorldTools
from draco_ray.rollout.tokens import TokenPolicy, TokenSequence, beginnings, join_token_sequences, turn_seed

_NO_TOOLS = "[]"


@dataclass(kw_only=True, eq=False)
class _Turn:
    """One turn of the policy."""

    branch: _Branch
    ids: list[int]
    start: int
    """Position of the turn's first token in the branch."""
    message_count: int
    """Number of messages of the conversation up to and including this turn."""
    text: str
    use: ParsedToolCalls | None
    side_call: bool
    cached: int
    """Number of tokens up to the end of the earlier turn that this turn continues; 0: it continues no turn."""
    opening: Sequence[Mapping[str, Any]]
    """For the first turn of a branch: the messages of its request that no other branch has."""
    seconds: float
    policy_version: int
    at: float
    """Time when the turn was sampled, in seconds of the monotonic clock."""
    call_ids: frozenset[str] = frozenset()
    answered: Sequence[Mapping[str, Any]] | None = None
    """The messages that the agent sent after this turn; None if it has sent none yet."""
    answered_at: float = 0.0

    @property
    def end(self) -> int:
        """Position after the turn's last token in the branch."""
        return self.start + len(self.ids)

    @property
    def called(self) -> bool:
        """Whether the turn called tools."""
        return self.use is not None and self.use.problem is None


@dataclass(kw_only=True, eq=False)
class _Branch(TokenSequence):
    """The tokens of a conversation."""

    tools: str
    session: str
    messages: list[str] = field(default_factory=list)
    """The keys (`message_key`) of the messages that the branch's tokens encode."""
    turns: list[_Turn] = field(default_factory=list)
    busy: bool = False
    """Whether a request that continues this branch is in progress."""


class Episode:
    """The requests of one agent while it does one task."""

    def __init__(
        self, request: RolloutRequest, policy: TokenPolicy, config: AgentConfig, tools: WorldTools | None = None
    ) -> None:
        """Limits: ``max_turns`` turns, and ``max_prompt_length + max_response_length`` tokens per branch.

        ``tools``: the world's tools, if it has any.
        """
        self.open = True
        self.name = secrets.token_hex(8)
        """Identifies the episode in requests."""
        self.key = secrets.token_urlsafe(24)
        self.tools = tools
        self.complaint: str | None = None
        """Why the last failed request for a turn got no answer."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done, with the policy's exception, once the policy has failed."""
        # Mark the exception as retrieved, or asyncio would log it.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())
        self.refused: EpisodeEnd | None = None
        """The limit for which the last request was refused."""
        self.stored: dict[str, tuple[Mapping[str, Any], ...]] = {}
        """Id of a response -> the conversation up to it, for requests that name a previous response."""
        self._request, self._policy, self._config = request, policy, config
        self._chat = policy.chat
        self._requests = 0
        self._branches: list[_Branch] = []
        self._turns: list[_Turn] = []
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        """Session -> keys of all its messages and tool lists so far."""
        self._without_stop: dict[str, str] = {}
        """Key of a turn together with the stop text that ended it -> its key without that text."""
        self._started_at = time.time()

    @property
    def model(self) -> str:
        """The episode's name and key. A request to the URL that all episodes share gives them as its ``model``."""
        return f"{self.name}.{self.key}"

    @property
    def turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._turns)

    @property
    def sessions(self) -> set[str]:
        """The sessions in which the policy has spoken so far."""
        return {branch.session for branch in self._branches}

    async def answer(self, request: TurnRequest) -> TurnReply:
        """Sample the policy's next turn in the conversation of a request.

        Raises: Refused; and whatever the policy raises.
        """
        if self._requests >= self._config.max_turns:
            self.refused = EpisodeEnd.TURN_LIMIT
            raise Refused(f"this episode has had its agent.max_turns={self._config.max_turns} turns", code="turn_limit")
        keys, began = [self._identity(message) for message in request.messages], time.monotonic()
        turn = self._longest(keys, request)
        branch, ids = self._tokens(request, turn)
        self._attach_results(request, turn, began)
        opening = self._opening(request, turn, branch)
        if turn is not None and turn.answered is None:
            # Do this even if the request is refused below, because it holds the turn's results.
            turn.answered, turn.answered_at = request.messages[turn.message_count :], began
        self._check_length(len(ids))
        branch.busy = True
        try:
            with self._asking():
                sample, text, use = await self._sample(request, ids)
        finally:
            branch.busy = False
        self._keep(branch, ids, sample)
        sampled = _Turn(
            branch=branch,
            ids=sample.token_ids,
            start=len(branch.ids) - len(sample.token_ids),
            message_count=len(keys) + 1,
            text=text,
            use=use,
            side_call=request.side_call or self._is_side_call(request.messages),
            cached=turn.end if turn else 0,
            opening=opening,
            seconds=time.monotonic() - began,
            policy_version=sample.policy_version,
            at=time.monotonic(),
        )
        self._known[request.session].update((*keys, request.tools))
        branch.turns.append(sampled)
        self._turns.append(sampled)
        answer = self._answer(sampled, sample, request.stop, len(ids))
        sampled.call_ids = frozenset(each for each, _ in answer.calls)
        branch.messages = [*keys, message_key(answer.message())]
        if answer.stopped_by:
            # Many agents append the stop text to the turn again.
            with_stop = {**answer.message(), "content": answer.content + answer.stopped_by}
            self._without_stop[message_key(with_stop)] = branch.messages[-1]
        self._known[request.session].add(branch.messages[-1])
        return answer

    async def _sample(self, request: TurnRequest, ids: list[int]) -> tuple[Sample, str, ParsedToolCalls | None]:
        """Sample a turn after ``ids`` within the limits. Returns: the sample, its text, and its tool calls."""
        self._requests += 1
        limits = (self._most_tokens - len(ids), request.max_tokens, self._config.max_turn_tokens)
        whole = await self._policy.sampler.sample(
            ids, max_tokens=min(each for each in limits if each), seed=turn_seed(self._request.seed, self._requests)
        )
        sample = self._stopped(whole, request.stop)
        text = self._chat.text(sample.token_ids)
        if sample.finish_reason != "stop" or request.tools == _NO_TOOLS:
            return sample, text, None
        return sample, text, await self._policy.read_calls(text, request.tools)

    def _check_length(self, tokens: int) -> None:
        """Check that a branch of ``tokens`` tokens may grow. Raises: Refused."""
        if tokens >= self._most_tokens:
            self.refused = EpisodeEnd.RESPONSE_LIMIT
            raise Refused(
                f"This model's maximum context length is {self._most_tokens} tokens. However, your messages resulted "
                f"in {tokens} tokens.",
                code="context_length_exceeded",
            )
        self.refused = None

    @property
    def _most_tokens(self) -> int:
        return self._config.max_prompt_length + self._config.max_response_length

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Store an error of the policy in `failed` and raise it. Raises: Refused if the episode has ended meanwhile."""
        try:
            yield
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        if not self.open:
            raise Refused("this episode has ended", status=410, code="episode_over")

    def count(self, request: TurnRequest) -> int:
        """Number of tokens of a request. Raises: Refused if the chat template refuses its messages."""
        return len(
            self._tokens(request, self._longest([self._identity(each) for each in request.messages], request))[1]
        )

    def trajectory(
        self,
        ended: EpisodeEnd,
        error: str | None,
        *,
        prompt: tuple[Message, ...],
        closing: str,
        sessions: Collection[str] | None = None,
        others: Iterable[tuple[float, Mapping[str, Any]]] = (),
    ) -> Trajectory:
        """All branches as one rollout; ends the episode.

        Args:
            closing: text of a last turn that reports how the agent's program ended; empty: no such turn.
            sessions: the sessions to train on; None: all. The rollout leaves the others out.
            others: what other speakers said: a time of the monotonic clock, in seconds, and a chat message.
        """
        self.open = False
        branches = [each for each in self._branches if sessions is None or each.session in sessions]
        own = [turn for turn in self._turns if turn.branch in branches]
        offsets = dict(zip(branches, beginnings(branches), strict=True))
        said = [(at, [_context(message, 0, 0, self._config)]) for at, message in others]
        # Side calls, such as requests for a title, may follow the agent's last turn.
        closing_turn = next((turn for turn in reversed(own) if not turn.side_call), None)
        steps = 0
        for turn in own:
            number, offset = branches.index(turn.branch), offsets[turn.branch]
            opening = [_context(each, number, offset + turn.start, self._config) for each in turn.opening]
            step = self._is_step(turn, last=turn is closing_turn)
            if step:
                turn.branch.steps[turn.start : turn.end] = [steps] * len(turn.ids)
                steps += 1
            spoken = [message for message in turn.answered or () if message["role"] != "tool"]
            after = [_context(each, number, offset + turn.end, self._config) for each in spoken]
            said.append((turn.at, [*opening, self._record(turn, number, offset, step), *after]))
        turns = [turn for _, several in sorted(said, key=itemgetter(0)) for turn in several]
        if closing:
            turns.append(
                Turn(text=closing, action=None, observation=None, first_token=0, last_token=0, role=PROGRAM_ROLE)
            )
        usage = Usage(
            calls=len(own),
            input_tokens=sum(turn.start for turn in own),
            cached_tokens=sum(turn.cached for turn in own),
            output_tokens=sum(len(turn.ids) for turn in own),
        )
        return Trajectory(
            **self._request.identity,
            policy_version=min((turn.policy_version for turn in own), default=0),
            prompt=prompt,
            turns=tuple(turns),
            **join_token_sequences(branches),
            prompt_length=own[0].start if own else 0,
            ended=ended,
            started_at=self._started_at,
            ended_at=time.time(),
            error=error,
            engine=self._policy.name,
            usage=usage,
            branches=tuple(offsets.values()) or (0,),
        )

    def _attach_results(self, request: TurnRequest, continued: _Turn | None, began: float) -> None:
        """Attach tool results to their turns if a rewritten history contains calls and results."""
        for turn in self._turns:
            if turn is continued or turn.answered is not None or turn.branch.session != request.session:
                continue
            results = [each for each in request.messages if each.get("tool_call_id") in turn.call_ids]
            if results:
                turn.answered, turn.answered_at = results, began
                self._known[request.session].update(map(self._identity, results))

    def _longest(self, keys: Sequence[str], request: TurnRequest) -> _Turn | None:
        """The session's recorded turn that matches the longest part of a conversation; among equals, the latest."""
        found: _Turn | None = None
        for branch in self._branches:
            if (branch.tools, branch.session) != (request.tools, request.session):
                continue
            for turn in branch.turns:
                longer = found is None or turn.message_count >= found.message_count
                count = turn.message_count
                if longer and count <= len(keys) and branch.messages[:count] == list(keys[:count]):
                    found = turn
        return found

    def _tokens(self, request: TurnRequest, turn: _Turn | None) -> tuple[_Branch, list[int]]:
        """The branch that a request continues, or a new one, and all tokens before the policy's turn."""
        try:
            if turn is None:
                tokens = self._chat.conversation(request.messages, json.loads(request.tools))
                return _Branch(tools=request.tools, session=request.session), tokens
            calls = [call.name for call in turn.use.calls] if turn.use is not None else []
            glue = self._chat.after_messages(turn.ids, calls, request.messages[turn.message_count :])
        except ConfigError as error:
            raise Refused(str(error), code="chat_template") from error
        branch = turn.branch
        ids = branch.ids[: turn.end] + glue
        at_its_end = turn is branch.turns[-1] and not branch.busy
        return (branch if at_its_end else _Branch(tools=request.tools, session=request.session)), ids

    def _keep(self, branch: _Branch, ids: Sequence[int], sample: Sample) -> None:
        if not branch.turns:
            self._branches.append(branch)
        branch.add(ids[len(branch.ids) :])
        branch.add(sample.token_ids, sample.logprobs)

    def _stopped(self, sample: Sample, stop: Sequence[str]) -> Sample:
        """The sample truncated after the token that completes the first of the agent's stop texts."""

        def stopped(length: int) -> bool:
            text = self._chat.text(sample.token_ids[:length])
            return any(each in text for each in stop)

        whole = len(sample.token_ids)
        return sample.cut(bisect.bisect_left(range(whole), True, key=stopped)) if stopped(whole) else sample

    def _identity(self, message: Mapping[str, Any]) -> str:
        """`message_key` of a message, ignoring the stop text that ended a turn."""
        found = message_key(message)
        return self._without_stop.get(found, found)

    def _answer(self, turn: _Turn, sample: Sample, stop: Sequence[str], prompt_tokens: int) -> TurnReply:
        """The reply that the agent receives for a turn."""
        said = after_reasoning(turn.text, thinking=self._chat.opens_thinking)
        reasoning = turn.text.removesuffix(said).strip().removeprefix("<think>").removesuffix("</think>").strip()
        calls: tuple[tuple[str, ToolCall], ...] = ()
        if turn.use is not None and turn.called:
            said = said.partition(turn.use.text)[0]
            calls = tuple((f"call_{secrets.token_hex(12)}", call) for call in turn.use.calls)
        finish = "length" if sample.finish_reason == "length" else "tool_calls" if calls else "stop"
        end, stopped_by = min(((said.find(each), each) for each in stop if each in said), default=(len(said), ""))
        return TurnReply(
            # Keep white space right before a stop text: the agent may continue from there.
            content=said[:end].lstrip() if stopped_by else said.strip(),
            reasoning=reasoning,
            calls=calls,
            finish_reason=finish,
            stopped_by=stopped_by,
            prompt_tokens=prompt_tokens,
            cached_tokens=turn.cached,
            completion_tokens=len(sample.token_ids),
        )

    def _opening(self, request: TurnRequest, turn: _Turn | None, branch: _Branch) -> Sequence[Mapping[str, Any]]:
        """The new messages at the beginning of a branch that this request opens.

        If the session knows some of the messages, one line says how many. The list of tools is included if it is new.
        Empty if the request continues a branch, or if the messages will be recorded as what followed ``turn``.
        """
        if turn is not None and (branch is turn.branch or turn.answered is None):
            return ()
        given = request.messages[turn.message_count if turn else 0 :]
        known = self._known[request.session]
        new = [message for message in given if self._identity(message) not in known]
        old = len(given) - len(new)
        counted = [{"role": "context", "content": f"({old} messages as before)"}] if old else []
        tools = [{"role": TOOLS, "content": request.tools}] if request.tools not in {_NO_TOOLS, *known} else []
        return [*tools, *counted, *new]

    def _is_side_call(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        told = [str(each["content"]) for each in messages if each["role"] in ("system", "user")]
        return is_side_call(self._config.side_calls, told)

    def _is_step(self, turn: _Turn, *, last: bool) -> bool:
        """Whether a turn is a step that gets credit. The program has received every turn; side calls are gaps."""
        if turn.side_call:
            return False
        closing_gap = last and turn.answered is None and self._config.closing_turn == "gap"
        return is_step(acts=turn.called, message="" if closing_gap else self._delivered(turn))

    def _delivered(self, turn: _Turn) -> str:
        return after_reasoning(turn.text, thinking=self._chat.opens_thinking).strip()

    def _record(self, turn: _Turn, branch: int, offset: int, step: bool) -> Turn:
        action = None
        # If the agent offers no tools and answered a text, the text may be an action in the agent's own format.
        acts = turn.use is not None or turn.branch.tools == _NO_TOOLS
        if step and (turn.called or (acts and turn.answered is not None)):
            action = turn.use.text if turn.use is not None else self._delivered(turn)
        observation = None
        if results := [message for message in turn.answered or () if message["role"] == "tool"]:
            names = [call.name for call in turn.use.calls] if turn.use is not None else []
            told = number_tool_results(names, [str(message.get("content") or "") for message in results])
            observation = cut_output(told, self._config.max_output_characters)
        return Turn(
            text=turn.text,
            action=action,
            observation=observation,
            first_token=offset + turn.start,
            last_token=offset + turn.end,
            seconds_generating=turn.seconds,
            seconds_executing=max(0.0, turn.answered_at - turn.at) if turn.answered is not None else 0.0,
            role=SIDE_CALL if turn.side_call else "assistant",
            branch=branch,
            policy_version=turn.policy_version,
            message=step and action is None,
        )


def _context(message: Mapping[str, Any], branch: int, at: int, config: AgentConfig) -> Turn:
    """A chat message that the policy did not sample, as a turn with the speaker's role and without tokens."""
    content = str(message.get("content") or "")
    if calls := message.get("tool_calls"):
        content = "\n".join([content, *(json.dumps(call["function"], ensure_ascii=False) for call in calls)]).strip()
    # The role "assistant" is for turns that the policy has sampled.
    role = "earlier assistant" if message["role"] == "assistant" else str(message["role"])
    text = content if role == TOOLS else cut_output(content, config.max_output_characters)
    return Turn(text=text, action=None, observation=None, first_token=at, last_token=at, role=role, branch=branch)
