"""Commands that read runs and analyse them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import (
    SANDBOX_ROOT,
    ApiBase,
    Commands,
    KeyVariable,
    RunArgument,
    Trust,
    call_with_options,
    check_no_effect,
    parse_phase,
    run_folder,
)
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES, Credit, Score

app = Commands()
runs = Commands(no_args_is_help=True, help="Look at finished and running runs.")
app.add_typer(runs, name="runs")


@runs.command(name="show")
def runs_show(
    directory: RunArgument,
) -> None:
    """Print a run: its setting, a line per step, and evaluations."""
    from draco_ray.lab.runs.show import show
    from draco_ray.runs.remote.location import checkpoint_steps

    # Checkpoints are large and stay in the store; only their number is printed.
    show(run_folder(directory), checkpoints=checkpoint_steps(directory))


@runs.command(name="cost")
def runs_cost(
    directory: RunArgument,
) -> None:
    """Print the cost of judging: tokens and dollars by phase and by step."""
    from draco_ray.lab.runs.cost import show_cost

    show_cost(run_folder(directory))


@runs.command(name="timeline")
def runs_timeline(
    directory: RunArgument,
    *,
    step: Annotated[int, typer.Option(min=1)],
    out: Path,
) -> None:
    """Write the timeline of a step for chrome://tracing or ui.perfetto.dev.

    Args:
        step: A training step.
        out: JSON file to write.
    """
    from draco_ray.lab.runs.timeline import write_timeline

    typer.echo(f"{out}: {write_timeline(run_folder(directory), step, out)} events")


@runs.command(name="inspect", epilog="Try:  draco runs inspect runs/NAME --out logs      inspect view --log-dir logs")
def runs_inspect(
    directory: str,
    *,
    out: Annotated[Path, typer.Option(metavar="DIR")],
) -> None:
    """Write a run with its evaluations, or one evaluation, as logs for the viewer of Inspect.

    Rollouts become samples; rewards and verdicts, or whether the task was solved, become scores.

    Args:
        directory: A run directory or its URL, or an evaluation directory.
        out: Folder for the logs.
    """
    from draco_ray.lab.runs.inspect_logs import write_logs
    from draco_ray.terminal import counted

    typer.echo(f"{out}: {counted(len(write_logs(run_folder(directory), out)), 'log')}")


@app.command(epilog="Try:  draco report runs/NAME      draco report runs/A runs/B --figures --out figures")
def report(
    directories: Annotated[list[str], typer.Argument(metavar="DIR")],
    *,
    figures: bool = False,
    tables: bool = False,
    tokens: bool = False,
    out: Path | None = None,
) -> None:
    """Write a run as one HTML page: what the judge said and where the credit went.

    Args:
        directories: A run directory or its URL, or several to compare.
        figures: Write the paper's figures as SVG instead.
        tables: Write tidy tables as Parquet and CSV instead.
        tokens: Show each sampled token with its log-probability and advantage.
        out: The file, or the folder of figures and tables (default: inside the first run).
    """
    from draco_ray.commands.report import write_reports

    if tokens and (figures or tables):
        raise ConfigError("--tokens: works only for the page; leave out --figures and --tables")
    for path in call_with_options(write_reports, locals(), directories=[run_folder(each) for each in directories]):
        typer.echo(path)


@app.command(name="verify", epilog="Try:  draco verify runs/NAME")
def verify_run(
    directory: RunArgument,
    *,
    model: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    trust: Trust = False,
) -> None:
    """Check a run's files and recompute its rewards, advantages and adapters; report the first difference.

    Adapters are recomputed only for runs with engine.deterministic=true.

    Args:
        model: The base model (default: the path in the run's configuration).
    """
    from draco_ray.lab.verify import verify
    from draco_ray.terminal import console

    verify(run_folder(directory, checkpoints=True), model=model, trust=trust, console=console)


@app.command(
    epilog="Try:  draco replay runs/NAME      draco replay runs/NAME --judge openai/gpt-5.4-mini --step 1 --step 50"
)
def replay(
    context: typer.Context,
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    *,
    judge: str | None = None,
    step: Annotated[list[int] | None, typer.Option(min=1)] = None,
    rule: list[str] | None = None,
    phase: Annotated[list[str] | None, typer.Option(parser=parse_phase, metavar="|".join(PHASES))] = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    pairing: str | None = None,
    static_rubric: Path | None = None,
    out: Path | None = None,
    trust: Trust = False,
) -> None:
    """Run advantage rules over recorded verdicts, or send archived judge calls to another judge.

    Args:
        directory: A run directory or its URL.
        judge: Ask another judge instead: a LiteLLM model, files:DIR, rules (offline), own (the run's judge) or policy
            (the previous step's checkpoint).
        step: Only this training step; may be repeated.
        rule: Only this advantage rule (algorithm.rule); may be repeated.
        phase: With --judge: a phase to repeat; may be repeated (default: score, credit).
        pairing: With --phase stage1, stage2 or union: model that compares criteria, or rules.
        static_rubric: With --judge: score the rollouts against this rubric (repeats phases only with --phase).
        out: Folder of the tables (default: replay/ in the run).
    """
    from draco_ray.commands.replay import replay_algorithm, replay_judge
    from draco_ray.lab.analysis.judges import NamedJudge

    if judge is None:
        of_judge = ("phase", "api_base", "api_key_env", "pairing", "static_rubric")
        check_no_effect(context, "without --judge MODEL", *of_judge)
        written = replay_algorithm(run_folder(directory), rules=rule or None, steps=step, out=out)
    else:
        check_no_effect(context, "with --judge, which repeats judge calls", "rule")
        written = call_with_options(
            replay_judge,
            locals(),
            directory=run_folder(directory, checkpoints=judge == "policy"),
            judge=NamedJudge(model=judge, api_base=api_base, api_key_env=api_key_env),
            pairing=None if pairing is None else NamedJudge(model=pairing),
            phases=phase or ([] if static_rubric else [Score.name, Credit.name]),
            steps=step,
        )
    for path in written:
        typer.echo(path)


@app.command(epilog="Try:  draco agreement labels.jsonl")
def agreement(
    labels: Annotated[list[Path], typer.Argument(metavar="FILE")],
    *,
    out: Path | None = None,
) -> None:
    """Measure a judge against people's labels.

    Args:
        labels: Labels exported from draco report's page.
        out: Folder for the tables (default: write none).
    """
    from draco_ray.commands.agreement import agreement as measure

    for path in measure(labels, out=out):
        typer.echo(path)


@app.command(
    name="attribution-bench",
    epilog="Try:  draco attribution-bench --tasks 5      draco attribution-bench --judge openai/gpt-5.4-mini --hard",
)
def attribution_bench(
    context: typer.Context,
    *,
    judge: str | None = None,
    world: Path = SANDBOX_ROOT,
    split: str = "test_normal",
    tasks: Annotated[int | None, typer.Option(min=1)] = None,
    hard: bool = False,
    config: str | None = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    wrong_step: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    processes: Annotated[int, typer.Option(min=1)] = 2,
    out: Path = Path("attribution"),
    labels: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    trust: Trust = False,
) -> None:
    """Plant known faults in scripted rollouts, and measure how well a judge and step credit find the faulty steps.

    Args:
        judge: The judge: a LiteLLM model, files:DIR, own (the judge of --config) or rules (the offline judge).
            Default: own if --config names a judge, else rules.
        world: Folder of the sandbox whose tasks are used.
        split: Use the tasks of this split.
        tasks: Use only N tasks of the split.
        hard: Use harder rollouts, some with two faults or a fault that shows only later; the judge writes the rubric.
        config: A preset, a YAML file or a run, for the judge's settings.
        wrong_step: With --judge rules: fraction of citations that are changed to a wrong step.
        processes: Number of AppWorld processes that execute the rollouts.
        out: Folder for the tables; rollouts that were already executed there are reused.
        labels: Instead of planting faults: measure judges against the step labels of people in this JSON file.
    """
    from draco_ray.commands.attribution_bench import attribution_bench as run_bench
    from draco_ray.commands.attribution_bench import attribution_labels
    from draco_ray.lab.analysis.judges import NamedJudge, configures_judge

    if labels is not None:
        check_no_effect(
            context, "with --labels FILE", *(name for name in context.params if name not in ("labels", "out"))
        )
        for path in attribution_labels(labels, out=out):
            typer.echo(path)
        return
    if judge is None:
        judge = "own" if config is not None and configures_judge(load_config(config, trust=True)) else "rules"
    named = NamedJudge(model=judge, api_base=api_base, api_key_env=api_key_env)
    for path in call_with_options(run_bench, locals(), judge=named):
        typer.echo(path)
