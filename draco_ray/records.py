"""Records passed between the parts: Task -> Trajectory -> Criterion -> Verdict -> Attribution -> TrainingSample.

Suffixes of array names give the axes: ``G`` rollouts of a group, ``K`` criteria, ``M`` steps, ``T`` tokens. Steps count
from 0 in arrays and from 1 in text for judges and people. Records are frozen dataclasses with NumPy arrays, so Ray
keeps one copy in the object store, which readers map without copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]
BoolArray = NDArray[np.bool_]

GAP = -1
"""Step index of tokens outside steps: prompt, chat template, tool output, and turns that nobody received."""


TOOLS = "tools"
"""Role of the message in a prompt that lists the tools."""
PROGRAM_ROLE = "program"
"""Role of the turn that reports how an agent's program ended; it belongs to no branch."""
SIDE_CALL = "side call"
"""Role of a model's turn outside the agent's conversation: a title, a guard's verdict, a summary."""


class EpisodeEnd(StrEnum):
    """Why the agent loop stopped. `Termination` is the category recorded for the rollout."""

    FINISHED = "finished"
    """The agent ended the loop with a turn that has no action."""
    TURN_LIMIT = "turn_limit"
    RESPONSE_LIMIT = "response_limit"
    """The next turn or observation would exceed the response length."""
    CRASHED = "crashed"
    """The agent's code ended or broke the environment's process: the rollout has failed."""
    SERVER_ERROR = "server_error"
    """The environment's process was lost for another reason: the rollout is retried."""
    UNSTATED = "unstated"
    """Unknown; used for traces of other agents."""


class Termination(StrEnum):
    """How a rollout ended, according to the environment; `FINISHED` if the environment defines no modes."""

    SUBMITTED = "submitted"
    """AppWorld: the agent called ``complete_task``."""
    GAVE_UP = "gave_up"
    """AppWorld: the agent called ``complete_task`` with status "fail", or stopped without calling it."""
    NO_ACTION = "no_action"
    """The rollout ended without a step."""
    RESPONSE_LIMIT = "response_limit"
    TURN_LIMIT = "turn_limit"
    CRASHED = "crashed"
    """The agent's code ended or broke its environment."""
    SERVER_ERROR = "server_error"
    """The rollout was lost: its environment failed in every attempt."""
    FINISHED = "finished"
    """The agent ended the rollout."""

    @classmethod
    def shown(cls, used: Iterable[Termination]) -> list[Termination]:
        """The modes that a table lists.

        `SUBMITTED` and `GAVE_UP` are listed if either is in ``used``, `FINISHED` if it is in ``used``, and all other
        modes always.
        """
        occur = set(used)
        kinds = ({cls.SUBMITTED, cls.GAVE_UP}, {cls.FINISHED})
        return [mode for mode in cls if all(mode not in kind or kind & occur for kind in kinds)]


class Verdict(IntEnum):
    """A criterion's rating (Section "Dynamic Per-Trajectory Rubrics")."""

    PASS = 1
    FAIL = -1
    NOT_APPLICABLE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as the policy may see it, without ground truth or difficulty."""

    task_id: str
    group: str = ""
    """The scenario that the task is a variant of; scenario goal completion needs success in all. Empty: none."""
    instruction: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Values for the placeholders of the agent's prompt other than ``task_description``."""
    tools: str = ""
    """The task's tools: a JSON array of function schemas as in OpenAI's ``tools``. Empty: none."""

    @property
    def scenario(self) -> str:
        """Unit of resampling in confidence intervals: the task's group, or the task."""
        return self.group or self.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A chat message; the role is ``system``, ``user``, ``assistant``, or `TOOLS` with a JSON array of schemas."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn: a *step* or a gap (`is_step`)."""

    text: str
    """The decoded sampled text, without the end-of-turn token, and including the action."""
    action: str | None = None
    """The action, e.g. the content of the code block or the tool calls; None for a message or a gap."""
    observation: str | None = None
    """The observation as shown to the policy, already truncated; None if there was no action."""
    first_token: int = 0
    last_token: int = 0
    """Half-open span ``[first_token, last_token)`` of the turn's sampled tokens in ``Trajectory.token_ids_T``; in
    an imported trace at most the length of the span is known."""
    seconds_generating: float = 0.0
    seconds_executing: float = 0.0
    role: str = "assistant"
    """The speaker: the agent, `SIDE_CALL`, or a user or another agent, whose turns are gaps without sampled tokens."""
    branch: int = 0
    """Index of the turn's branch (`Trajectory.branches`)."""
    policy_version: int | None = None
    """Adapter version that sampled the turn, if known per turn."""
    message: bool = False
    """Whether the turn is a step without an action: a message to a user, a caller or another agent."""

    @property
    def tokens(self) -> int | None:
        """Number of sampled tokens; None if it is not known."""
        return self.last_token - self.first_token or None

    @property
    def is_step(self) -> bool:
        """Whether the turn acted or delivered a message."""
        return self.action is not None or self.message


def is_step(*, acts: bool, message: str = "") -> bool:
    """The definition of a step (docs/method.md): a turn of the policy that has a recipient.

    Args:
        acts: whether the turn calls a tool or runs code.
        message: the turn's text after the reasoning, to a user, a caller or another agent; empty if nobody received it.
    """
    return acts or bool(message.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens, requests and cost of a policy's turns; add two with ``+``."""

    calls: int = 0
    """Turns sampled."""
    requests: int = 0
    """HTTP requests of an API model, retries included."""
    input_tokens: int = 0
    """Input of all turns, including cached tokens; a conversation counts again at each turn."""
    cached_tokens: int = 0
    """Part of ``input_tokens`` that a prefix cache could serve (local) or did serve (API)."""
    output_tokens: int = 0
    dollars: float | None = None
    """None: no price is known."""

    def __add__(self, other: Usage) -> Usage:
        known = [usage.dollars for usage in (self, other) if usage.dollars is not None]
        return Usage(
            calls=self.calls + other.calls,
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            dollars=sum(known) if known else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A rollout of T tokens, including the prompt.

    A two-turn example, ``P`` prompt, ``a`` sampled in step 0, ``g`` glue and tool output, ``c`` a closing message::

        tokens     P  P  P  a  a  a  g  g  c  c
        sampled_T  0  0  0  1  1  1  0  0  1  1
        step_T    -1 -1 -1  0  0  0 -1 -1  1  1

    An agent that rewrites its history or has sub-agents produces several token sequences, its *branches*. The arrays
    hold them one after another; turns, and so steps, are numbered in time across branches.
    """

    task_id: str
    group: str
    """Group identity, ``step<optimizer step>/<task_id>``."""
    rollout: int
    """Index in the group, 0 .. G-1."""
    attempt: int
    """0: the first attempt; a rollout that ended in ``server_error`` is retried in a new environment."""
    policy_version: int
    """Adapter version that sampled the rollout; 0 is the untrained policy."""
    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...]
    token_ids_T: IntArray
    sampled_T: BoolArray
    """Whether the policy sampled the token: the loss mask."""
    logprob_T: FloatArray
    """Natural-log probability at sampling; 0.0 for tokens that were not sampled."""
    step_T: IntArray
    prompt_length: int
    ended: EpisodeEnd
    started_at: float
    ended_at: float
    """Unix seconds."""
    error: str | None = None
    engine: str = ""
    usage: Usage = field(default_factory=Usage)
    termination: Termination | None = None
    """How the rollout ended according to the environment; None: not determined yet."""
    branches: tuple[int, ...] = (0,)
    """Start of each branch in the arrays, ascending from 0; tokens do not attend to other branches."""
    scenario: str = ""
    """The task's group, or the task's id if it has no group (`Task.scenario`). Empty: unknown; the task then counts
    as its own scenario."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids_T), len(self.sampled_T), len(self.logprob_T), len(self.step_T)}
        if len(lengths) != 1:
            raise ValueError(f"trajectory {self.name}: token arrays of different lengths {sorted(lengths)}")
        if self.branches[:1] != (0,) or any(later <= earlier for earlier, later in pairwise(self.branches)):
            raise ValueError(
                f"trajectory {self.name}: branches begin at tokens {self.branches}; expected ascending numbers from 0"
            )
        if len(self.branches) > 1 and self.branches[-1] >= len(self.token_ids_T):
            raise ValueError(f"trajectory {self.name}: branch {len(self.branches)} has no token")

    @property
    def name(self) -> str:
        """``<task>/<rollout>``, as it appears in logs and in the Ray dashboard."""
        return f"{self.task_id}/{self.rollout}"

    @property
    def steps(self) -> tuple[Turn, ...]:
        """The turns that are steps, in order; index j here is the value in ``step_T``."""
        return tuple(turn for turn in self.turns if turn.is_step)

    @property
    def acted(self) -> bool:
        """Whether a step called a tool or ran code."""
        return any(turn.action is not None for turn in self.turns)

    @property
    def tokens_M(self) -> IntArray:
        """n_j: number of sampled tokens of each of the M steps."""
        inside = self.step_T[self.step_T != GAP]
        return np.bincount(inside, minlength=len(self.steps)).astype(np.int64)

    @property
    def branch_spans(self) -> tuple[slice, ...]:
        """The slice of the arrays of each branch."""
        return tuple(slice(*ends) for ends in pairwise((*self.branches, len(self.token_ids_T))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One rubric item."""

    title: str
    description: str
    evaluator_instruction: str
    source: str = ""
    """The judge phase that wrote the criterion: ``stage1``, ``stage2/<rollout>``, ``proposals`` or ``union``.
    ``static``: it is from the static rubric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCriterion:
    """The scoring call's verdict on one criterion; drives dropout and the reward."""

    verdict: Verdict
    evidence: str = ""
    justification: str = ""
    steps: tuple[int, ...] | None = None
    """The steps responsible (see `Attribution.steps`), if the scoring call also named them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The credit call's verdict on one criterion and the steps responsible; drives step quality."""

    criterion: int
    """Index into the group's rubric."""
    verdict: Verdict
    """The credit call's verdict, which may override the scoring call's."""
    steps: tuple[int, ...]
    """1-based step numbers, ascending, unique, within the trajectory."""
    explanation: str = ""

    @classmethod
    def of_scores(cls, scores: Iterable[ScoredCriterion]) -> tuple[Attribution, ...]:
        """The attributions from a call that returned verdicts and steps together."""
        return tuple(
            cls(criterion=index, verdict=score.verdict, steps=score.steps or (), explanation=score.justification)
            for index, score in enumerate(scores)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalCost:
    """The cost of a reply when it was made, stored with the reply in the cache."""

    call_id: str
    """`JudgeCall.call_id` of the call that paid for the reply."""
    requests: int
    dollars: float
    estimated_dollars: float
    seconds: float
    started_at: float
    waited_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """A request to the judge and its result: the unit of the archive and of cost accounting."""

    call_id: str
    phase: str
    """Name of the phase (`draco_ray.judging.phases`)."""
    group: str
    task_id: str
    rollout: int | None
    """None for calls about a whole task or group (stage1, union)."""
    model: str
    prompt: str
    reply: str
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    """Part of ``input_tokens`` served from the provider's prompt cache."""
    output_tokens: int
    dollars: float
    started_at: float
    seconds: float
    requests: int
    """Number of HTTP requests, including retries; 0 if the reply came from the durable cache."""
    error: str | None = None
    """Why the reply could not be used; None if it was used."""
    reasoning_tokens: int = 0
    """Part of ``output_tokens`` spent on reasoning."""
    estimated_dollars: float = 0.0
    """Part of ``dollars`` that is an upper bound, for requests without a reported usage."""
    waited_seconds: float = 0.0
    """Part of ``seconds`` spent waiting for the rate limiter."""
    paid: OriginalCost | None = None
    """For a reply from the durable cache: its original cost."""


ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Generic[ValueT]):
    """The result of a phase: its value or an error, with all its calls."""

    value: ValueT | None
    calls: tuple[JudgeCall, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()
    """Problems tolerated in a usable reply (too many criteria, a translated title, a verdict without a step), and
    whether the prompt was truncated."""
    left_out: int = 0
    """Number of characters cut from the prompt to fit the judge's context."""

    @property
    def ok(self) -> bool:
        """Whether the phase produced a usable value."""
        return self.error is None


class CreditFallback(StrEnum):
    """Why a trajectory's advantage was spread uniformly instead of by Eq. ``credit``."""

    NONE = "none"
    CREDIT_OFF = "credit_off"
    NO_STEP = "no_step"
    """The rollout has no step: all its sampled tokens receive A_i."""
    NO_CITATION = "no_citation"
    VANISHING_NORMALISER = "vanishing_normaliser"
    CREDIT_CALL_FAILED = "credit_call_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAdvantage:
    """One rollout's share of the update (Eqs. ``grpo-adv``, ``stepq``, ``stepw``, ``credit``)."""

    rollout: int
    reward: float
    """R_i in [-1, 1]."""
    advantage: float
    """A_i, unitless."""
    quality_M: FloatArray
    """Q_j in [0, 1]; all NaN if no step is cited."""
    step_advantage_M: FloatArray
    """a_j, the advantage of every token of step j."""
    cited_M: BoolArray
    fallback: CreditFallback
    inert: bool
    """Whether credit is the same for all steps (appendix "Why step credit needs dynamic rubrics")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a group's scored rollouts, and the criteria that survived dropout."""

    group: str
    surviving_K: BoolArray
    """Criteria that at least one rollout failed."""
    rollouts: tuple[RolloutAdvantage, ...]
    """One entry per rollout that has statistics, ascending by index; rollouts whose score call failed are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A branch of a trajectory for the learner: T tokens with their advantages."""

    group: str
    task_id: str
    rollout: int
    policy_version: int
    token_ids_T: IntArray
    loss_mask_T: BoolArray
    """Whether the policy sampled the token; the token-mean and the KL term count only these tokens."""
    advantage_T: FloatArray
    """a_j on the tokens of step j, 0 elsewhere; without credit or steps, A_i on every sampled token."""
    logprob_T: FloatArray
    """The engine's log-prob at sampling; 0.0 where ``loss_mask_T`` is false."""
    prompt_length: int
    branch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter in PEFT's format, sent from the learner to the engines."""

    version: int
    """Number of training steps that the adapter was trained for; 0: it is untrained."""
    config: dict[str, object]
    """PEFT's ``adapter_config.json``."""
    tensors: dict[str, FloatArray]
    """PEFT's tensor names -> float32 arrays."""


WeightUpdate = Adapter
"""What a learner sends to the engines. To add another kind, e.g. full weights, define ``Adapter | Other`` and handle it
in `draco_ray.engine.vllm_engine.VllmEngine.load`."""

LOST_ROLLOUT = "the rollout was lost"
"""Entry in the failures of an `Evaluation` whose rollout was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluated rollout with the environment's verdict; never used for training in outcome-blind settings."""

    task_id: str
    run: int
    success: bool
    passed_tests: int
    total_tests: int
    turns: int
    ended: EpisodeEnd
    termination: Termination | None = None
    """None: the benchmark has no such label."""
    difficulty: int | None = None
    failures: tuple[str, ...] = field(default=())
    scenario: str = ""
    """The task's group, or the task's id if it has no group (`Task.scenario`)."""
    reward: float | None = None
    """Graded result, if the environment has one."""

    @property
    def lost(self) -> bool:
        """Whether every attempt crashed for a reason other than the policy.

        Such a rollout counts as a failure; reports also state the number of lost rollouts.
        """
        return LOST_ROLLOUT in self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A held-out rollout scored by the judge, for environments without an evaluator."""

    task_id: str
    run: int
    scenario: str = ""
    """The task's group, or the task's id if it has no group (`Task.scenario`)."""
    verdicts: tuple[int, ...] = ()
    """+1, -1 or 0 per criterion of its task's rubric."""
    again: tuple[int, ...] = ()
    """Verdicts of a second scoring call; empty if it failed."""
    error: str | None = None
    """Why the rollout has no verdicts; None if it has."""


def lost_evaluation(task: Task, run: int) -> Evaluation:
    """The evaluation of a rollout whose every attempt crashed; counts as a failure."""
    return Evaluation(
        task_id=task.task_id,
        run=run,
        success=False,
        passed_tests=0,
        total_tests=0,
        turns=0,
        ended=EpisodeEnd.SERVER_ERROR,
        termination=Termination.SERVER_ERROR,
        failures=(LOST_ROLLOUT,),
        scenario=task.scenario,
    )
