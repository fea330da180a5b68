"""Records that the parts exchange: Task -> Trajectory -> Criterion -> Verdict -> Attribution -> TrainingSample.

Suffixes on array names give the axes: ``G`` rollouts of a group, ``K`` criteria, ``M`` steps, ``T`` tokens.
Steps are 0-based in arrays and 1-based wherever a judge or a person reads them. Records are plain frozen dataclasses
around NumPy buffers, so Ray keeps one copy in the object store and every reader maps it without copying.
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
"""Step index of a token that belongs to no step: prompt, template glue, tool output, a turn that nobody received."""


TOOLS = "tools"
"""Role of the message in a prompt that lists what the agent may call."""
PROGRAM = "program"
"""Role of the turn that reports how an agent's program ended; it belongs to no branch."""


class EpisodeEnd(StrEnum):
    """What stopped the agent's loop; `Termination` says how that counts."""

    FINISHED = "finished"
    """The agent ended it, by a turn without an action."""
    TURN_LIMIT = "turn_limit"
    RESPONSE_LIMIT = "response_limit"
    """The next turn or the environment's output would not fit the response length."""
    CRASHED = "crashed"
    """The agent's own code ended or corrupted the environment's process: the rollout has failed."""
    SERVER_ERROR = "server_error"
    """The environment's process was lost, not through the agent: the rollout is retried."""
    UNSTATED = "unstated"
    """A trace of another agent does not say."""


class Termination(StrEnum):
    """How a rollout ended, as the environment reports it; `FINISHED` for environments without their own terms."""

    SUBMITTED = "submitted"
    """AppWorld: it called ``complete_task``."""
    GAVE_UP = "gave_up"
    """AppWorld: it called ``complete_task`` with status "fail", or stopped without a call of it."""
    NO_ACTION = "no_action"
    """The agent ended the rollout without a step."""
    RESPONSE_LIMIT = "response_limit"
    TURN_LIMIT = "turn_limit"
    CRASHED = "crashed"
    """The agent's code ended or corrupted its environment."""
    SERVER_ERROR = "server_error"
    """Lost: its environment failed until the retries were used up."""
    FINISHED = "finished"
    """The agent ended it."""

    @classmethod
    def shown(cls, used: Iterable[Termination]) -> list[Termination]:
        """The values that a table of these rollouts lists: AppWorld's terms, `FINISHED`, or both where both occur."""
        occur = set(used)
        unused = ({cls.SUBMITTED, cls.GAVE_UP} if cls.FINISHED in occur else {cls.FINISHED}) - occur
        return [mode for mode in cls if mode not in unused]


class Verdict(IntEnum):
    """A criterion's rating (Section "Dynamic Per-Trajectory Rubrics")."""

    PASS = 1
    FAIL = -1
    NOT_APPLICABLE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task as the policy sees it: no ground truth, no difficulty."""

    task_id: str
    group: str = ""
    """The scenario of which this task is a variant: SGC requires that all of its tasks succeed. Empty: none."""
    instruction: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further values for the agent's prompt, by placeholder."""
    tools: str = ""
    """Available tools: a JSON array of function schemas, as in OpenAI's ``tools``. Empty: none."""

    @property
    def scenario(self) -> str:
        """Sampling unit of bootstrap intervals: the task's group, or the task itself."""
        return self.group or self.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message: role is ``system``, ``user``, ``assistant``, or `TOOLS` with a JSON array of schemas."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: a *step* or a gap (`is_step`)."""

    text: str
    """The sampled text, without the end-of-turn token."""
    action: str | None
    """What was executed, e.g. the content of the code block; None for a message or a gap."""
    observation: str | None
    """The environment's output as the policy read it (already truncated). None without an action."""
    first_token: int
    last_token: int
    """Half-open span ``[first_token, last_token)`` of the turn's sampled tokens in ``Trajectory.token_ids_T``."""
    seconds_generating: float = 0.0
    seconds_executing: float = 0.0
    role: str = "assistant"
    """The speaker: the agent, or in traces of other agents also a user or another agent, whose turns are gaps without
    sampled tokens."""
    branch: int = 0
    """Index of its token sequence (`Trajectory.branches`)."""
    policy_version: int | None = None
    """Adapter version that sampled it, if known per turn."""
    message: bool = False
    """Whether it is a step without an action: a message that somebody received."""

    @property
    def is_step(self) -> bool:
        """Whether it acted, or is a message that somebody received."""
        return self.action is not None or self.message


def is_step(*, acts: bool, message: str = "", answered: bool = False) -> bool:
    """The rule of what a step is (docs/method.md): a turn of the policy that somebody receives.

    Args:
        acts: it calls a tool or runs code.
        message: its text after the reasoning, to a user, a caller or another agent; empty if nobody received it.
        answered: whether it was answered.
    """
    return acts or answered or bool(message.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and cost of a policy's turns; can be added."""

    calls: int = 0
    """Turns sampled."""
    requests: int = 0
    """HTTP requests of an API model, retries included."""
    input_tokens: int = 0
    """Summed over turns, cached tokens included: a conversation is read again at each turn."""
    cached_tokens: int = 0
    """The part of ``input_tokens`` that a prefix cache could serve (local) or served (API)."""
    output_tokens: int = 0
    dollars: float | None = None
    """None where no price is known."""

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
    """One rollout of T tokens (prompt included), written once.

    A two-turn example, ``P`` prompt, ``a`` sampled in step 0, ``g`` glue and tool output, ``c`` a closing message::

        tokens     P  P  P  a  a  a  g  g  c  c
        sampled_T  0  0  0  1  1  1  0  0  1  1
        step_T    -1 -1 -1  0  0  0 -1 -1  1  1

    An agent that rewrites its history, or has sub-agents, produces several token sequences: its *branches*. They are
    concatenated in the arrays; turns and steps are numbered chronologically over all of them.
    """

    task_id: str
    group: str
    """Group identity, ``step<optimizer step>/<task_id>``."""
    rollout: int
    """Index in the group, 0 .. G-1."""
    attempt: int
    """0 for the first try; a rollout that ended in ``server_error`` is retried in a fresh environment."""
    policy_version: int
    """Adapter version that sampled it; 0 is the untrained policy."""
    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...]
    token_ids_T: IntArray
    sampled_T: BoolArray
    """True where the policy sampled the token: the loss mask."""
    logprob_T: FloatArray
    """Natural-log probability at sampling; 0.0 where the token was not sampled."""
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
    """How it ended, as the environment reports it; None until it was asked."""
    branches: tuple[int, ...] = (0,)
    """Start of each token sequence in the arrays, ascending from 0. Branches do not attend to each other."""
    scenario: str = ""
    """Scenario of the task: its group, or its id. Empty: the task is its own scenario."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids_T), len(self.sampled_T), len(self.logprob_T), len(self.step_T)}
        if len(lengths) != 1:
            raise ValueError(f"trajectory {self.name}: token arrays of different lengths {sorted(lengths)}")
        if self.branches[:1] != (0,) or any(later <= earlier for earlier, later in pairwise(self.branches)):
            raise ValueError(f"trajectory {self.name}: branches begin at {self.branches}, expected ascending from 0")
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
        """n_j: sampled tokens inside each of the M steps."""
        inside = self.step_T[self.step_T != GAP]
        return np.bincount(inside, minlength=len(self.steps)).astype(np.int64)

    @property
    def branch_spans(self) -> tuple[slice, ...]:
        """The slice of each branch in the arrays."""
        return tuple(slice(*ends) for ends in pairwise((*self.branches, len(self.token_ids_T))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """One rubric item."""

    title: str
    description: str
    evaluator_instruction: str
    source: str = ""
    """Where it was proposed: ``stage1``, ``stage2/<rollout>``, ``union`` or ``static``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCriterion:
    """The scoring call's verdict on one criterion; drives dropout and the reward."""

    verdict: Verdict
    evidence: str = ""
    justification: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The credit call's verdict on one criterion and the steps responsible; drives step quality."""

    criterion: int
    """Index into the group's rubric."""
    verdict: Verdict
    """May override the scoring verdict."""
    steps: tuple[int, ...]
    """1-based step numbers, ascending, unique, within the trajectory."""
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """The original cost of a stored reply; it travels with the reply."""

    call_id: str
    """Id of the call that paid for it."""
    requests: int
    dollars: float
    estimated_dollars: float
    seconds: float
    started_at: float
    waited_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One request to the judge and its reply: the unit of the archive and of cost accounting."""

    call_id: str
    phase: str
    """Name of the phase (`draco_ray.judging.phases`)."""
    group: str
    task_id: str
    rollout: int | None
    """None for the calls of a whole task or group (stage1, union)."""
    model: str
    prompt: str
    reply: str
    finish_reason: str
    input_tokens: int
    cached_tokens: int
    """The part of ``input_tokens`` that the provider served from its prompt cache."""
    output_tokens: int
    dollars: float
    started_at: float
    seconds: float
    requests: int
    """HTTP requests made for it, retries included; 0 when it came from the durable reply cache."""
    error: str | None = None
    """Why the reply could not be used; None when it was."""
    reasoning_tokens: int = 0
    """Reasoning part of ``output_tokens``."""
    estimated_dollars: float = 0.0
    """The part of ``dollars`` that no reply states: the most that those requests may have cost."""
    waited_seconds: float = 0.0
    """The part of ``seconds`` spent waiting for rate limits or a judge that was down."""
    paid: Paid | None = None
    """Original cost of a reply from the durable cache."""


ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Generic[ValueT]):
    """The result of a phase: its value, or the reason there is none, with all calls."""

    value: ValueT | None
    calls: tuple[JudgeCall, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()
    """Flaws of a usable reply (surplus criteria, a translated title, a verdict without a step), and that the prompt was
    truncated."""
    left_out: int = 0
    """Characters of the prompt that were truncated to fit the judge's context."""
    looked_at: int = 0
    """Verdicts whose justifications got a second look (`draco_ray.judging.judge`)."""
    contradicted: int = 0
    """Those whose justification argues for another verdict."""

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
    """Q_j in [0, 1]; NaN throughout when no step is cited."""
    step_advantage_M: FloatArray
    """a_j, the advantage of every token of step j."""
    cited_M: BoolArray
    fallback: CreditFallback
    inert: bool
    """Whether credit drew no distinction between steps (appendix "Why step credit needs dynamic rubrics")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a group's scored rollouts, and which criteria survived dropout."""

    group: str
    surviving_K: BoolArray
    """Criteria that at least one member failed."""
    rollouts: tuple[RolloutAdvantage, ...]
    """One entry per rollout that has statistics, ascending by index; rollouts whose score call failed are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One branch of a trajectory for the learner: T tokens and the advantage of each."""

    group: str
    task_id: str
    rollout: int
    policy_version: int
    token_ids_T: IntArray
    loss_mask_T: BoolArray
    """Sampled tokens: the valid tokens of the token-mean and of the KL term."""
    advantage_T: FloatArray
    """a_j on the tokens of step j, 0 elsewhere; A_i on every sampled token where there is no credit or no step."""
    logprob_T: FloatArray
    """The engine's log-prob at sampling; 0.0 off the mask."""
    prompt_length: int
    branch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter as PEFT saves it, sent from the learner to the engines."""

    version: int
    """Number of optimizer steps behind it, counted in training steps; 0 is the untrained adapter."""
    config: dict[str, object]
    """PEFT's ``adapter_config.json``."""
    tensors: dict[str, FloatArray]
    """PEFT's tensor names -> float32 arrays."""


WeightUpdate = Adapter
"""What a learner sends to the engines. Another kind (whole weights, say) joins as ``Adapter | Other``, and gets a case
in `draco_ray.engine.vllm_engine.VllmEngine.load`."""

LOST = "the rollout was lost"
"""Failure of an `Evaluation` whose rollout was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluated rollout: the environment's own verdict. Never reaches training in an outcome-blind setting."""

    task_id: str
    run: int
    success: bool
    passed_tests: int
    total_tests: int
    turns: int
    ended: EpisodeEnd
    termination: Termination | None = None
    """None where the benchmark does not tell."""
    difficulty: int | None = None
    failures: tuple[str, ...] = field(default=())
    scenario: str = ""
    """The task's: its group, or its id."""
    reward: float | None = None
    """Numeric reward, if the environment gives more than success or failure."""

    @property
    def lost(self) -> bool:
        """Whether every attempt crashed, not through the policy: it counts as a failure and is shown as lost."""
        return LOST in self.failures


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRollout:
    """A held-out rollout scored by the judge, for environments without an evaluator."""

    task_id: str
    run: int
    scenario: str = ""
    """The task's: its group, or its id."""
    verdicts: tuple[int, ...] = ()
    """+1, -1 or 0 by criterion of its task's rubric."""
    again: tuple[int, ...] = ()
    """Verdicts of a second scoring call; empty if that failed."""
    error: str | None = None
    """Why it has no verdicts."""


def lost_evaluation(task: Task, run: int) -> Evaluation:
    """A rollout whose every attempt crashed: a failure, never left out."""
    return Evaluation(
        task_id=task.task_id,
        run=run,
        success=False,
        passed_tests=0,
        total_tests=0,
        turns=0,
        ended=EpisodeEnd.SERVER_ERROR,
        termination=Termination.SERVER_ERROR,
        failures=(LOST,),
        scenario=task.scenario,
    )
