"""Errors a caller may want to tell apart. Each message is one line: what is wrong, what was expected, what to do.

    DracoError
    ├── MissingExtra         a package that the light base install leaves out (also an ImportError)
    ├── ConfigError          what the user typed: unknown key, value out of range, missing file
    ├── WorldError           an environment's data or task that cannot be used
    ├── EnvironmentCrashed   an environment that died or hung (the rollout ends, the run goes on)
    │   ├── WorldBroken      a rollout's own code broke its server (the rollout has failed; it is not retried)
    │   └── IsolationUnavailable  the host cannot confine model-written code as configured (the run stops)
    ├── JudgeUnavailable     a judge that cannot be reached or refuses requests (the run stops, resumable)
    │   └── BudgetSpent      the judging budget is spent (the run stops, resumable)
    ├── RubricError          no criterion is left when a static rubric is authored
    ├── ReplyError           a judge's reply that breaks its contract (retried once, then the call fails)
    ├── EngineError          an engine that cannot load a model or an adapter
    ├── EngineNotReady       an engine that does not serve yet (the request goes to another engine, or waits)
    ├── LearnerError         a checkpoint that does not fit, or workers lost for good
    ├── ClusterError         Ray does not start, or a process of the run was lost for good
    ├── StoreError           the run directory cannot be written
    ├── TraceError           none of the given files has a trace that can be read
    ├── DamagedRun           a file of a run directory that is damaged or was changed; the message names it
    ├── RunStopped           a run that learns nothing, or a step that never ends (resumable)
    ├── TooManyLost          an evaluation that lost more rollouts than it may (resumable)
    ├── CanaryFailed         engine and learner disagree: the adapter is not live or log-probs differ
    └── TauBenchError        τ-bench cannot be run, or its results cannot be read

Every error takes exactly one argument, its message, so that it survives pickling between processes.
"""


class DracoError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1
    """Exit code of a command that ends with this error."""


class MissingExtra(DracoError, ImportError):
    """A package of an extra is needed but not installed; the message names the extra."""


class ConfigError(DracoError, ValueError):
    """The configuration cannot be used."""

    exit_code = 2


class WorldError(DracoError):
    """An environment's data or one of its tasks cannot be used."""


class EnvironmentCrashed(DracoError):
    """The environment of a slot died, hung or broke its protocol."""


class WorldBroken(EnvironmentCrashed):
    """The code of a rollout has ended or corrupted its environment: the rollout has failed, and counts as a result."""


class IsolationUnavailable(EnvironmentCrashed):
    """The host offers no isolation level that ``environment.isolation`` allows."""


class JudgeUnavailable(DracoError):
    """No judge call can succeed: the judge is unreachable, the key is refused, or the model is unknown."""


class BudgetSpent(JudgeUnavailable):
    """Another judge call could cost more than is left of the budget."""


class RubricError(DracoError):
    """Authoring a static rubric ended without a criterion."""


class ReplyError(DracoError, ValueError):
    """A judge's reply cannot be used; the message tells the judge what to correct."""


class EngineError(DracoError):
    """The policy engine cannot load a model or an adapter."""


class EngineNotReady(DracoError):
    """The policy engine's process does not serve yet."""


class LearnerError(DracoError):
    """The learner cannot go on: a checkpoint it cannot use, or workers that keep dying."""


class ClusterError(DracoError):
    """Ray does not start, or a process of the run died more often than it may be restarted."""


class StoreError(DracoError):
    """The run directory cannot be written: a full disk, or no permission."""


class TraceError(DracoError, ValueError):
    """No trace can be read where traces were expected."""

    exit_code = 2


class DamagedRun(DracoError):
    """A file of a run or an evaluation cannot be read, or its content is not what was written."""


class RunStopped(DracoError):
    """A run is stopped by its own monitoring: it learns nothing, its judge fails, or a step does not end."""


class TooManyLost(DracoError):
    """An evaluation has lost a larger share of its rollouts than allowed; finished rollouts are kept."""

    exit_code = 3


class CanaryFailed(DracoError):
    """After a weight sync the engine does not sample from the weights that the learner trained."""


class TauBenchError(DracoError):
    """tau2-bench cannot be run as configured, its process failed for good, or its result files cannot be read."""


def first_line(error: object) -> str:
    """The first non-empty line of an error's message; the name of its type if the message is empty.

    If Ray has wrapped the error, the message is that of the original error.
    """
    text = str(getattr(error, "cause", None) or error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def one_line(error: BaseException) -> str:
    """An error's message in one line of at most 300 characters, or its type if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
