"""``environment.options`` of ``environment.use: verifiers``."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from draco_ray.config.schema import EnvironmentConfig, Tree
from draco_ray.environments.base import checked_options
from draco_ray.environments.own_python import own_python

VARIABLE = "DRACO_VERIFIERS_PYTHON"
MADE_BY = "make setup-verifiers"


class VerifiersOptions(Tree):
    """What is played, and with what."""

    taskset: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own configuration; ``id`` is the name of an installed package, one of those that come with
    verifiers, or a file, ``./my_taskset.py``."""
    env: dict[str, Any] = Field(default_factory=dict)
    """The rest of verifiers' configuration of an environment: ``id``, and of each role its harness, runtime, limits,
    e.g. ``{agent: {harness: {id: "null"}}}``."""
    splits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of a split -> verifiers' selection of tasks (include, exclude, shuffle, seed, skip, limit). Empty: ``dev``
    is the first fifth of the tasks, 50 at most, and ``train`` the others, the next 1000 of a taskset without an end."""
    renderer: dict[str, Any] | None = None
    """What puts messages into tokens, of the package renderers: ``{name: qwen3}``. null: by the model's hub name;
    else the one whose tokens are the chat template's; where there is none the template as it is, without tools."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Of verifiers' sampling configuration: ``max_tokens``, ``chat_template_kwargs``. The rest is the run's."""
    success_at: float = 1.0
    """An episode whose reward is at least this has succeeded."""
    path: list[str] = Field(default_factory=list)
    """Folders in which tasksets and harnesses are looked for beside those that are installed."""
    pass_environment: list[str] = Field(default_factory=list)
    """Environment variables that verifiers' processes get beside PATH, HOME and their like: keys of services."""
    python: str | None = None
    """Python of verifiers' own environment; null: DRACO_VERIFIERS_PYTHON, else .venv-verifiers/bin/python."""
    facts: str = ""
    """What the judge has to know of this world: its rules, what no criterion may punish. Lines of a list."""


def read_options(config: EnvironmentConfig) -> VerifiersOptions:
    """The options, checked. Raises: ConfigError, one line."""
    return checked_options(VerifiersOptions, config.options)


def verifiers_python(options: VerifiersOptions) -> str:
    """Path of the interpreter of verifiers' virtual environment. Raises: WorldError."""
    return own_python(
        options.python,
        of="verifiers'",
        key="environment.options.python",
        variable=VARIABLE,
        folder=".venv-verifiers",
        made_by=MADE_BY,
    )


def told_to_bridge(options: VerifiersOptions, config: EnvironmentConfig, *, ground_truth: bool) -> str:
    """What the bridge reads on its standard input."""
    told = options.model_dump(include={"taskset", "env", "splits", "renderer", "sampling", "path"})
    return json.dumps({**told, "truth": ground_truth, "start_seconds": config.start_timeout_seconds})
