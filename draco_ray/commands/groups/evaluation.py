"""Commands that measure policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import (
    STARTER_MODEL,
    ApiBase,
    Commands,
    KeyVariable,
    Overrides,
    Trust,
    call_with_options,
    check_no_effect,
    run_folder,
)
from draco_ray.commands.tau import Beside, Form, tau
from draco_ray.config.ineffective_keys import check_effective
from draco_ray.errors import ConfigError
from draco_ray.lab.evaluation.rendering import ShownUncertainty, TableFormat

app = Commands()
app.add_typer(tau, name="tau")


@app.command(
    epilog="Try:  draco evaluate --policy starter --split dev --runs 3 data.eval_tasks=4      "
    "draco evaluate --run runs/NAME --last-epochs 3      draco evaluate --policy litellm:openai/gpt-5.4 --split "
    "test_normal --runs 1"
)
def evaluate(
    overrides: Overrides = None,
    *,
    policy: str | None = None,
    run: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    last_epochs: Annotated[int | None, typer.Option(min=1)] = None,
    train_curve: bool = False,
    every: Annotated[int | None, typer.Option(min=1)] = None,
    split: str | None = None,
    runs: Annotated[int | None, typer.Option(min=1)] = None,
    config: str | None = None,
    out: Path | None = None,
    label: str | None = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    api_temperature: Annotated[float | None, typer.Option(min=0)] = None,
    retry_errors: bool = False,
    trust: Trust = False,
) -> None:
    """Measure a policy with the benchmark's evaluator. After an interruption, run the same command to continue.

    If the environment has no evaluator, the judge's pass rate is measured instead, and reported as such.

    Args:
        policy: The policy: a model, a run (its last checkpoint), a checkpoint or adapter, starter, or litellm:MODEL.
        run: Instead of --policy: the run, or its URL, whose checkpoints are evaluated.
        last_epochs: With --run: evaluate the checkpoints that end the last N epochs, and average them (default: 3).
        train_curve: With --run: a learning curve, of the untrained policy and the checkpoints on the training split.
        every: With --train-curve: only the checkpoint of every N-th training step, and the last one (default: 1).
        split: Dataset (default: data.eval_split).
        runs: Independent rollouts per task (default: 3).
        config: A preset, a YAML file or a run (default: the run's own; sandbox for starter).
        out: Evaluation directory to write; if it holds an unfinished evaluation, that is continued.
        label: The setting's name in tables.
        api_temperature: Temperature of an API model (default: the provider's).
        retry_errors: Repeat rollouts that were lost to crashes or outages.
    """
    from draco_ray.commands.evaluate import EvaluateOptions
    from draco_ray.commands.evaluate import evaluate as run_evaluation
    from draco_ray.runs.remote.location import is_url

    if is_url(run) and out is None:
        raise ConfigError(
            f"--run {run}: the run is in an object store; add --out DIR, a local folder for its evaluation"
        )
    if is_url(policy):
        policy = str(run_folder(policy or "", checkpoints=True))
    options = call_with_options(
        EvaluateOptions,
        locals(),
        run=None if run is None else run_folder(run, checkpoints=True),
        overrides=overrides or [],
    )
    run_evaluation(options, STARTER_MODEL)


@app.command(
    name="eval-set",
    epilog="Try:  draco eval-set evaluations.yaml --against Base",
)
def eval_set(
    file: Path,
    overrides: Overrides = None,
    *,
    out: Path | None = None,
    against: str | None = None,
    form: Form = TableFormat.TEXT,
    show: Beside = ShownUncertainty.INTERVAL,
    retry_errors: bool = False,
    trust: Trust = False,
) -> None:
    """Measure several settings on several splits and benchmarks, and print their table.

    Run the same command again to continue; a changed configuration is refused. Exit code: 0 all finished, 1 an
    evaluation failed, 2 invalid arguments, 3 too many rollouts were lost, 130 Ctrl-C.

    Args:
        file: A YAML file (docs/evaluation.md).
        out: Folder of the set (default: evaluations/ and FILE's name).
        against: Compare every other setting with this one, paired.
        retry_errors: Repeat rollouts that were lost.
    """
    from draco_ray.commands.eval_set import evaluate_set

    call_with_options(evaluate_set, locals(), overrides=overrides or [], starter=STARTER_MODEL)


@app.command(epilog="Try:  draco reevaluate evaluations/starter-appworld-dev data.root=.cache/sandbox")
def reevaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    overrides: Overrides = None,
    *,
    config: str | None = None,
) -> None:
    """Run AppWorld's evaluator again on the saved worlds of an evaluation; exit code 1 if a result differs.

    Args:
        directory: An evaluation directory.
        config: A preset or a YAML file (default: sandbox for the sandbox's tasks, else the default configuration).
    """
    from draco_ray.commands.evaluate import reevaluate as evaluate_again

    check_effective("draco reevaluate", overrides or [], ("data.root", "environment"), {})
    if not evaluate_again(directory, config, overrides or []):
        raise typer.Exit(1)


@app.command(
    epilog="Try:  draco tables Base=evaluations/base DRACO=evaluations/draco --against Base --table main --show std"
)
def tables(
    context: typer.Context,
    directories: Annotated[list[str], typer.Argument(metavar="[LABEL=]DIR")],
    *,
    table: list[str] | None = None,
    form: Form = TableFormat.TEXT,
    show: Beside = ShownUncertainty.NOTHING,
    against: str | None = None,
    out: Path | None = None,
) -> None:
    """Print evaluated settings side by side as the paper's tables.

    Args:
        directories: Evaluation directories; equal labels make one row, BLOCK::LABEL puts it into a block.
        table: main, efficiency, difficulty, frontier, consistency, retention, cost or terminations; may
            be repeated (default: all).
        against: Compare every other setting with this one, paired.
        out: Folder for all tables in all formats.
    """
    from draco_ray.commands.evaluate import print_tables

    if out is not None:
        check_no_effect(context, "with --out, which writes every format", "form")
    print_tables(directories, tables=table or [], form=form, shown=show, against=against, out=out)
