"""``draco tau``: run τ-bench banking, check what it needs, print its tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.commands.groups.options import Commands, Overrides, Trust
from draco_ray.lab.evaluation.rendering import ShownUncertainty, TableFormat

if TYPE_CHECKING:
    from draco_ray.commands.evaluate import EvaluateOptions
    from draco_ray.config.schema import DracoConfig
    from draco_ray.lab.evaluation.policies import EvaluatedPolicy

tau = Commands(no_args_is_help=True, help="tau-bench banking, run by tau2-bench in an environment of its own.")

Config = Annotated[str, typer.Argument(help="A preset, a YAML file or a run directory: the policy's configuration.")]
Form = Annotated[TableFormat, typer.Option("--format", help="Format of the tables.")]
Beside = Annotated[ShownUncertainty, typer.Option("--show", help="What to print beside a mean.")]

SECTIONS_READ = ("setting", "seed", "model", "engine", "agent", "judge", "data", "tau_bench")
"""The sections of a configuration that tau-bench reads."""


@tau.command(epilog="Try:  draco tau run qwen3.6-27b --policy runs/NAME/checkpoints/step00100 --out tau/draco")
def run(
    config: Config,
    overrides: Overrides = None,
    *,
    policy: list[str],
    out: Path,
    label: str | None = None,
    retry_errors: bool = False,
    form: Form = TableFormat.TEXT,
    show: Beside = ShownUncertainty.NOTHING,
    trust: Trust = False,
) -> None:
    """Serve the policy, run tau2-bench on it, and print the tables.

    Args:
        policy: A checkpoint or adapter, a model directory, base, or litellm:<provider>/<model>; several times for
            several checkpoints of one setting.
        out: Evaluation directory; an existing one is continued.
        label: The setting's name in tables.
        retry_errors: Retry episodes that ended in an infrastructure error.
    """
    from draco_ray.benchmarks.tau.evaluate import evaluate_tau
    from draco_ray.benchmarks.tau.server import find_policy
    from draco_ray.config.load import load_config

    log_messages()
    resolved = load_config(config, overrides or [], trust=trust)
    policies = [find_policy(name, resolved) for name in policy]
    check_overrides(overrides or [], resolved, [each.api for each in policies])
    evaluate_tau(resolved, policies, out, label=label, retry_errors=retry_errors)
    tables([str(out)], form=form, show=show)


@tau.command()
def check(
    config: Config = "qwen3.6-27b",
    overrides: Overrides = None,
    *,
    trust: Trust = False,
) -> None:
    """Print which tau2-bench would be run, or what is missing."""
    from draco_ray.benchmarks.tau.tau2_process import find_tau2
    from draco_ray.config.ineffective_keys import check_effective
    from draco_ray.config.load import load_config

    check_effective("draco tau check", overrides or [], ("tau_bench",), {})
    found = find_tau2(TauBenchConfig.of(load_config(config, overrides or [], trust=trust)))
    typer.echo(f"tau2-bench {found.version}, commit {found.commit[:12]}, {len(found.tasks)} tasks, {found.python}")


@tau.command(name="tables", epilog="Try:  draco tau tables tau/base tau/draco --format markdown --show interval")
def tables(
    directories: Annotated[list[str], typer.Argument(metavar="[LABEL=]DIR")],
    *,
    form: Form = TableFormat.TEXT,
    show: Beside = ShownUncertainty.NOTHING,
) -> None:
    """Print success rates (SR) as p^k and pass@k, turns, costs by role and failures by kind of finished evaluations.

    Args:
        directories: Finished evaluations.
    """
    from draco_ray.benchmarks.tau.results import cost_by_role_table, failure_table
    from draco_ray.lab.evaluation.rendering import render
    from draco_ray.lab.evaluation.tables import (
        consistency_table,
        efficiency_table,
        frontier_table,
        main_table,
        open_settings,
        read_settings,
    )

    settings = read_settings(directories)
    opened = {
        label: [each for seeds in splits.values() for each in seeds]
        for label, splits in open_settings(directories).items()
    }
    printed = [table(settings) for table in (main_table, consistency_table, efficiency_table, frontier_table)]
    printed += [cost_by_role_table(opened), failure_table(opened)]
    typer.echo("\n".join(render(table, form, show) for table in printed), nl=False)


def policy_and_config(options: EvaluateOptions, starter: Path) -> tuple[EvaluatedPolicy, DracoConfig]:
    """The policy to evaluate, and its configuration with ``tau_bench`` changed by the options.

    Raises:
        ConfigError: the options name no usable policy or configuration.
    """
    from draco_ray.commands.evaluate import find_policy_and_config

    policy, config = find_policy_and_config(options, starter)
    tau_bench = TauBenchConfig.of(config)
    agent = tau_bench.agent
    if policy.api_model is not None:
        told = {name: value for name, value in asdict(policy.api).items() if value is not None}
        agent = agent.model_copy(update=told)
    trials = options.runs or tau_bench.trials
    return policy, config.updated(tau_bench={"trials": trials, "agent": agent})


def check_overrides(overrides: Sequence[str], config: DracoConfig, api: Sequence[bool]) -> None:
    """Refuse overrides that have no effect on these policies. Raises: ConfigError.

    Args:
        overrides: as typed.
        config: the resulting configuration.
        api: for each policy whether it is an API model.
    """
    from draco_ray.benchmarks.tau.tau2_process import DENSE_RETRIEVAL
    from draco_ray.config.ineffective_keys import check_effective

    idle = dict.fromkeys(("judge", "agent", "data"), "in tau-bench evaluations")
    idle |= dict.fromkeys(("judge.prices", "agent.thinking", "data.root"), "")
    idle["tau_bench.agent.model"] = "together with --policy"
    if (retrieval := TauBenchConfig.of(config).retrieval) not in DENSE_RETRIEVAL:
        idle |= dict.fromkeys(("tau_bench.embedder", "tau_bench.embeddings_cache"), f"with retrieval={retrieval}")
    if all(api):
        served = ("model", "engine", "agent.thinking", "tau_bench.server")
        idle |= dict.fromkeys(served, "for an API model")
    if not any(api):
        idle |= dict.fromkeys(
            ("tau_bench.agent.api_base", "tau_bench.agent.api_key_env"), "for a policy that is served here"
        )
    check_effective("tau-bench", overrides, SECTIONS_READ, idle)


def log_messages() -> None:
    """Log the messages of this package."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("draco_ray").setLevel(logging.INFO)
