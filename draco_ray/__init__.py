"""DRACO (Distributing Rubric-based Advantage for Credit Optimization) as a distributed Ray pipeline.

The public API; every name is imported when it is first used, so that ``import draco_ray`` itself imports nothing:
the jailed processes of model-written code and AppWorld's virtual environment import this package too.

========================  ==========================================================================================
`load_config`             a preset or a YAML file, a setting and ``key=value`` overrides, as a `DracoConfig`
`load_traces`             traces of any agent: OpenAI, Anthropic, Inspect, tau2-bench, verifiers, OpenTelemetry, ...
`judge`, `judge_sync`     a rubric, verdicts with evidence, the steps responsible, rewards and advantages of traces
`step_advantages`         verdicts and citations of a group to an advantage per step: the paper's closed form
`train`, `resume`         run and continue a training run (``pip install "draco-ray[train]"`` and an engine)
`RunDirectory`            the files of a run: its metrics, tables and checkpoints
`surviving_criteria`      criteria that at least one rollout of a group fails
`rubric_rewards`          verdicts to a reward per rollout
`group_advantages_G`      rewards to an advantage per rollout (GRPO)
`step_quality`            cited steps to a quality per step
`Verdict`, `Attribution`  a judge's rating of a criterion, and the steps it names as responsible
`DracoError`              base of every error this package raises on purpose
========================  ==========================================================================================

A configuration:

    >>> import draco_ray
    >>> config = draco_ray.load_config("sandbox", ["train.steps=3", "seed=1"], setting="no-credit")
    >>> config.train.steps, config.algorithm.rule
    (3, 'grpo')

From the verdicts of a group to step advantages. The second of two rollouts fails two of three criteria; the judge holds
its third step responsible for one of them, and its first step for the one that passes:

    >>> good, bad = draco_ray.step_advantages(
    ...     verdicts=[[1, 1, -1], [-1, -1, 1]],
    ...     citations=[None, {0: [3], 2: [1]}],
    ...     tokens=[[20, 10], [10, 10, 10]],
    ... )
    >>> bad.round(2)
    array([-0.  , -0.71, -1.41])
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draco_ray.algorithm.closed_form import step_advantages
    from draco_ray.algorithm.equations import group_advantages_G, rubric_rewards, step_quality, surviving_criteria
    from draco_ray.config.load import load_config
    from draco_ray.config.schema import DracoConfig
    from draco_ray.errors import DracoError
    from draco_ray.records import Attribution, Verdict
    from draco_ray.runs.directory import RunDirectory
    from draco_ray.traces.library import judge, judge_sync
    from draco_ray.traces.load import load_traces
    from draco_ray.training.run import resume, train

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "DracoConfig",
    "DracoError",
    "RunDirectory",
    "Verdict",
    "group_advantages_G",
    "judge",
    "judge_sync",
    "load_config",
    "load_traces",
    "resume",
    "rubric_rewards",
    "step_advantages",
    "step_quality",
    "surviving_criteria",
    "train",
]

_MODULES = {
    "Attribution": "records",
    "DracoConfig": "config.schema",
    "DracoError": "errors",
    "RunDirectory": "runs.directory",
    "Verdict": "records",
    "group_advantages_G": "algorithm.equations",
    "judge": "traces.library",
    "judge_sync": "traces.library",
    "load_config": "config.load",
    "load_traces": "traces.load",
    "resume": "training.run",
    "rubric_rewards": "algorithm.equations",
    "step_advantages": "algorithm.closed_form",
    "step_quality": "algorithm.equations",
    "surviving_criteria": "algorithm.equations",
    "train": "training.run",
}


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is used (PEP 562).

    Raises: MissingExtra if the name needs a package that the base install leaves out; AttributeError if it is unknown.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from draco_ray.extras import explain_missing_extras

    with explain_missing_extras():
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the module's names, including public names that were not imported yet.

    If Ray is not installed, the names that need Ray are left out, because ``help`` imports every listed name.
    """
    missing = {"resume", "train"} if find_spec("ray") is None else set()
    return sorted({*globals(), *__all__} - missing)
