"""Refuses keys on the command line that have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draco_ray.config.keys import dotted_keys
from draco_ray.config.load import parse_override
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError
from draco_ray.registry import installed


def overridden_keys(overrides: Iterable[str]) -> list[str]:
    """The keys set by ``KEY=VALUE`` arguments; if a value is a mapping, the keys in it.

    >>> overridden_keys(["seed=1", "judge.limits={dollars: 5}"])
    ['seed', 'judge.limits.dollars']
    """
    leaves = set(dotted_keys())

    def below(tree: Mapping[str, Any], prefix: str) -> list[str]:
        found: list[str] = []
        for name, value in tree.items():
            key = f"{prefix}{name}"
            found += below(value, f"{key}.") if isinstance(value, Mapping) and key not in leaves else [key]
        return found

    return [key for each in overrides for key in below(parse_override(each), "")]


def check_effective(command: str, overrides: Iterable[str], read: Sequence[str], idle: Mapping[str, str]) -> None:
    """Refuse keys that have no effect.

    Args:
        command: for messages.
        overrides: ``KEY=VALUE`` arguments.
        read: keys and sections that the command uses.
        idle: keys and sections without effect -> the reason. The longest match of a key applies; an empty reason means
            that the key has an effect.

    Raises:
        ConfigError: a key has no effect.
    """
    for key in overridden_keys(overrides):
        parts = key.split(".")
        above = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        if not any(each in read for each in above):
            raise ConfigError(f"{command}: {key} has no effect; this command reads only {', '.join(read)}")
        if reason := next((idle[each] for each in above if each in idle), ""):
            raise ConfigError(f"{command}: {key} has no effect {reason}")


TRAINING = (
    *("setting", "seed", "data", "model", "agent", "environment", "engine", "judge", "algorithm", "learner", "train"),
    *("watch", "run", "ray"),
)
"""Sections used by training."""
ENDPOINT_KEYS = ("extra_body", "reasoning_effort", "service_tier", "prompt_cache", "jury", "strong", "fallbacks")
"""Keys of ``judge`` that apply only to a model behind an endpoint."""


def ineffective_judge_keys(config: DracoConfig) -> dict[str, str]:
    """Keys of judge and advantage rule without effect in this configuration, for `check_effective`."""
    judge, idle = config.judge, dict[str, str]()
    for part, switch, on in (
        ("judge.rule_judge", "start", judge.rule_judge.start),
        ("judge.self_judge", "enabled", judge.self_judge.enabled),
        ("judge.local", "enabled", judge.local.enabled),
    ):
        if not on:
            idle |= {part: f"without {part}.{switch}=true", f"{part}.{switch}": ""}
    if judge.self_judge.enabled:
        idle |= {f"judge.{key}": "with judge.self_judge.enabled=true" for key in ENDPOINT_KEYS}
    if judge.files is not None:
        keys = (*ENDPOINT_KEYS[:4], "api_base", "api_key_env", "temperature", "structured_output", "limits", "cache")
        idle |= {f"judge.{key}": f"with judge.model={judge.model}, which answers through files" for key in keys}
    if not judge.jury:
        idle["judge.strong"] = "without judge.jury: the strong judge only decides where jury and judge differ"
    idle["judge.held_out"] = "except in training with algorithm.reward=rubric"
    if judge.examples is None:
        idle["judge.max_examples"] = "without judge.examples"
    rule = config.algorithm.rule
    if rule != "draco_calibrated" and ":" not in rule and rule not in installed("algorithm.rule"):
        idle["algorithm.reliability"] = "without algorithm.rule=draco_calibrated"
    return idle


def check_training_keys(overrides: Iterable[str], config: DracoConfig) -> None:
    """Refuse keys without effect on a training run. Raises: ConfigError."""
    train, idle = config.train, ineffective_judge_keys(config)
    idle["learner.sft_learning_rate"] = "on training; only `draco sft` uses it"
    if config.algorithm.reward == "rubric":
        del idle["judge.held_out"]
    if config.judge.held_out is None:
        idle["watch.drift"] = "without judge.held_out"
    if config.algorithm.rubric != "static":
        idle["algorithm.static_rubric"] = "without algorithm.rubric=static"
    if config.agent.use != "command":
        idle |= dict.fromkeys(("agent.command", "agent.function"), "without agent.use=command")
    if config.environment.min_slots is None:
        idle["environment.idle_seconds"] = "without environment.min_slots"
    if train.steps is not None:
        idle["train.epochs"] = f"with train.steps={train.steps}; set train.steps=null to use epochs"
    if train.keep_last is None:
        idle |= dict.fromkeys(
            ("train.keep_every", "train.keep_best"), "without train.keep_last: all checkpoints are kept"
        )
    if not train.evaluate_before_after:
        idle["train.evaluation_runs"] = "without train.evaluate_before_after=true"
    if config.learner.mask_low is None and config.learner.mask_high is None:
        idle["learner.mask_level"] = "without learner.mask_low or learner.mask_high"
    if not isinstance(config.run.root, str):
        idle["run.local"] = "unless run.root is an object store"
    if config.ray.address is not None:
        own = ("object_store_mib", "dashboard")
        idle |= {f"ray.{key}": "with ray.address: that Ray cluster is already running" for key in own}
    check_effective("train", overrides, TRAINING, idle)
