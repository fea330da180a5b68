"""``environment.options`` of ``environment.use: verifiers``."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from draco_ray.config.schema import ConfigSection, EnvironmentConfig
from draco_ray.environments.base import checked_options
from draco_ray.environments.own_python import own_python
from draco_ray.errors import ConfigError, WorldError

PYTHON_VARIABLE = "DRACO_VERIFIERS_PYTHON"
MADE_BY = "make setup-verifiers"


class VerifiersSampling(ConfigSection):
    """verifiers' sampling configuration; the run sets the rest."""

    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of a turn."""


class VerifiersOptions(ConfigSection):
    """The taskset to play, and the settings for playing it."""

    taskset: dict[str, Any] = Field(default_factory=dict)
    """Configuration of the taskset; ``id`` is an installed package, a taskset of verifiers, or a file,
    ``./my_taskset.py``."""
    env: dict[str, Any] = Field(default_factory=dict)
    """The rest of verifiers' environment configuration: ``id``, and harness, runtime and limits of each role, e.g.
    ``{agent: {harness: {id: "null"}}}``."""
    splits: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name of a split -> verifiers' selection of tasks (include, exclude, shuffle, seed, skip, limit), at most 10,000.
    Empty: ``dev`` contains the first fifth of the tasks, at most 50, and ``train`` the others; of an infinite taskset,
    the next 1000."""
    sampling: VerifiersSampling = VerifiersSampling()
    success_at: float = 1.0
    """Minimum reward with which an episode counts as success."""
    path: list[str] = Field(default_factory=list)
    """Folders with tasksets and harnesses that are not installed."""
    pass_environment: list[str] = Field(default_factory=list)
    """Additional environment variables for verifiers' processes, besides PATH, HOME and similar ones: e.g. keys."""
    python: str | None = None
    """Python of verifiers' virtual environment; null: DRACO_VERIFIERS_PYTHON, else .venv-verifiers/bin/python."""
    facts: str = ""
    """Facts about this environment for the judge: its rules, and what no criterion may punish. One list item a line."""


def read_options(config: EnvironmentConfig) -> VerifiersOptions:
    """Check the options. Raises: ConfigError: one line."""
    return checked_options(VerifiersOptions, config.options)


def verifiers_python(options: VerifiersOptions) -> str:
    """Path of the interpreter of verifiers' virtual environment. Raises: ConfigError: there is none."""
    try:
        return own_python(
            options.python,
            of="verifiers'",
            key="environment.options.python",
            variable=PYTHON_VARIABLE,
            folder=".venv-verifiers",
            made_by=MADE_BY,
        )
    except WorldError as error:
        raise ConfigError(str(error)) from None


def bridge_options_json(options: VerifiersOptions, *, ground_truth: bool) -> str:
    """The bridge's options, a line of JSON."""
    told = options.model_dump(include={"taskset", "env", "splits", "sampling", "path"})
    return json.dumps({**told, "truth": ground_truth})
