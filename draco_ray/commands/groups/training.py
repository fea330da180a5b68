"""Commands that train a policy or prepare it."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import (
    Commands,
    Overrides,
    Setting,
    Trust,
    call_with_options,
    check_no_effect,
    parse_phase,
)
from draco_ray.config.ineffective_keys import TRAINING, check_effective, check_training_keys, ineffective_judge_keys
from draco_ray.config.load import load_config, preset_names, project_file
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES

PRESETS = ", ".join(preset_names())

app = Commands()
new = Commands(no_args_is_help=True, help="Write a template to start from.")
prompts = Commands(no_args_is_help=True, help="The judge's prompts.")
rubric = Commands(no_args_is_help=True, help="Static rubrics, for settings without dynamic rubrics.")
app.add_typer(new, name="new")
app.add_typer(prompts, name="prompts")
app.add_typer(rubric, name="rubric")


@app.command(epilog="Try:  draco train sandbox train.steps=3      draco train sandbox --setting no-credit")
def train(
    config: Annotated[
        str | None,
        typer.Argument(help=f"A preset ({PRESETS}) or a YAML file; not needed with --resume."),
    ] = None,
    overrides: Overrides = None,
    *,
    setting: Setting = None,
    resume: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    resume_or_start: bool = False,
    allow_changed_config: bool = False,
    trust: Trust = False,
) -> None:
    """Train a policy; all results are in the run directory that is printed at the end.

    Args:
        resume: Continue the run in this directory, or at this URL.
        resume_or_start: Continue the run with the name run.name, or start it if there is none.
        allow_changed_config: With --resume: accept a configuration that differs from the run's.
    """
    overrides = overrides or []
    if resume is not None and resume_or_start:
        raise ConfigError("--resume DIR and --resume-or-start cannot be combined; give only one of them")
    if resume is None and config is None:
        raise ConfigError(f"draco train: expected a preset ({PRESETS}), a YAML file, or --resume DIR")
    if allow_changed_config and resume is None and not resume_or_start:
        raise ConfigError("--allow-changed-config: works only with --resume DIR")
    from draco_ray.commands.check import check_memory
    from draco_ray.training import run

    if resume is not None and config is not None and "=" in config:
        # With --resume, the first word is an override.
        overrides = [config, *overrides]
        config = None
    if resume is not None:
        done = run.resume(resume, config, overrides, setting, allow_changed=allow_changed_config, trust=trust)
    else:
        assert config is not None
        loaded = load_config(config, overrides, setting, trust=trust)
        check_training_keys(overrides, loaded)
        if resume_or_start:
            done = run.resume_or_start(
                loaded,
                config,
                overrides,
                setting,
                allow_changed=allow_changed_config,
                trust=trust,
                checks=[check_memory],
            )
        else:
            done = run.train(loaded, checks=[check_memory])
    _say_how_sure(done)


def _say_how_sure(run: Path) -> None:
    """Print a run's gain with its intervals, if the run was evaluated before and after training."""
    from draco_ray.lab.evaluation.setting import describe_run_gain
    from draco_ray.runs.directory import RunDirectory

    if (line := describe_run_gain(RunDirectory.open(run))) is not None:
        typer.echo(line)


@app.command(name="config", epilog="Try:  draco config sandbox      draco config sandbox --setting static")
def show_config(
    config: str | None = None,
    overrides: Overrides = None,
    *,
    setting: Setting = None,
    keys: bool = False,
) -> None:
    """Print the configuration a run would use.

    Args:
        config: A preset or a YAML file; without one, the defaults are shown.
        keys: Every key with its type, value and meaning.
    """
    from draco_ray.config.keys import described_keys
    from draco_ray.config.load import dump_config

    resolved = load_config(config, overrides or [], setting, trust=True)
    if not keys:
        typer.echo(dump_config(resolved), nl=False)
        return
    for key in described_keys(resolved):
        changed = "" if key.value == key.default else f"   (default {key.default})"
        typer.echo(f"{key.name}={key.value}{changed}")
        typer.echo(textwrap.fill(f"{key.kind}. {key.meaning}", 110, initial_indent="    ", subsequent_indent="    "))


@app.command(name="check", epilog="Try:  draco check sandbox      draco check shop/environment.yaml model.path=DIR")
def check_config(
    config: Annotated[str, typer.Argument(help=f"A preset ({PRESETS}) or a YAML file.")],
    overrides: Overrides = None,
    *,
    setting: Setting = None,
    trust: Trust = False,
) -> None:
    """List everything that would stop a run of this configuration on this machine, and what to set instead."""
    from draco_ray.commands.check import check

    loaded = load_config(config, overrides or [], setting, trust=trust)
    check_training_keys(overrides or [], loaded)
    check(loaded)


@app.command(
    epilog="Try:  draco plan qwen3.6-27b --gpu-memory-gib 140      draco plan --simulate runs/NAME --rollouts 1024"
)
def plan(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(help=f"A preset ({PRESETS}) or a YAML file.")] = None,
    overrides: Overrides = None,
    *,
    setting: Setting = None,
    gpu_memory_gib: Annotated[float, typer.Option(min=1)] = 80,
    model_config: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    assume: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    simulate: Annotated[Path | None, typer.Option(metavar="RUN")] = None,
    compare: Annotated[Path | None, typer.Option(metavar="RUN")] = None,
    rollouts: Annotated[list[int] | None, typer.Option(min=1, max=100_000)] = None,
    engines: Annotated[int | None, typer.Option(min=1, max=100_000)] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=100_000)] = None,
    requests_per_minute: Annotated[float | None, typer.Option(min=1)] = None,
    staleness: Annotated[list[int] | None, typer.Option(min=0, max=16)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Print the memory that each GPU needs and the expected time of a step, or simulate steps of a recorded run.

    Args:
        gpu_memory_gib: Memory of one GPU, GiB.
        model_config: The model's config.json, if the model is not on this machine.
        assume: Throughput to assume (docs/planning.md); may be repeated.
        simulate: Simulate steps of other sizes from this run.
        compare: With --simulate: also predict the steps of this second run.
        rollouts: Rollouts of a simulated step; may be repeated (default: 96, 1024, 16384).
        engines: Simulated engines (default: the run's).
        slots: Simulated environment slots (default: the run's).
        requests_per_minute: Simulated limit of judge requests per minute (default: the run's).
        staleness: Print throughput on 8 to 512 GPUs at this train.staleness; may be repeated.
        seed: Random seed of the simulation.
    """
    number = {"slots": slots, "engines": engines, "requests_per_minute": requests_per_minute}
    if simulate is None:
        check_no_effect(context, "without --simulate RUN", *number, "rollouts", "compare", "staleness", "seed")
        if config is None:
            raise ConfigError("draco plan: expected CONFIG or --simulate RUN")
        from draco_ray.commands.plan import plan as print_plan
        from draco_ray.lab.planning.step_time import assumptions

        resolved, given = load_config(config, overrides or [], setting, trust=True), assumptions(assume or [])
        print_plan(resolved, gpu_memory_gib=gpu_memory_gib, model_config=model_config, given=given)
        return
    if config is not None:
        raise ConfigError(f"draco plan --simulate: the configuration comes from the run; leave out {config!r}")
    check_no_effect(context, "with --simulate RUN", "setting", "gpu_memory_gib", "model_config", "assume")
    from draco_ray.commands.simulate import simulate_run

    simulate_run(simulate, other=compare, rollouts=rollouts or (), setting=number, staleness=staleness or (), seed=seed)


@app.command(
    epilog="Try:  draco sft shop/environment.yaml shop/demonstrations.jsonl --out warm model.path=DIR      "
    "draco sft CONFIG runs/NAME --best 2 --out warm"
)
def sft(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help=f"A preset ({PRESETS}), a YAML file or a run.")],
    source: Path,
    overrides: Overrides = None,
    *,
    out: Path = Path("sft"),
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    best: Annotated[int, typer.Option(min=1)] = 1,
    new: bool = False,
) -> None:
    """Warm start: fine-tune model.path on demonstrations and write a model to train from.

    Args:
        source: JSONL of messages, or a run directory for its best rollouts.
        out: Model directory to write.
        epochs: Passes over the demonstrations.
        best: With a run: number of best rollouts to take per task.
        new: Start from a tiny untrained stand-in model instead of model.path.
    """
    from draco_ray.commands.sft import SECTIONS_READ, fine_tune, ineffective_sft_keys

    if not source.is_dir():
        check_no_effect(context, "with demonstrations; it selects rollouts of a run", "best")
    loaded = load_config(config, overrides or [])
    check_effective("draco sft", overrides or [], SECTIONS_READ, ineffective_sft_keys(loaded, new=new))
    fine_tune(loaded, source, out, epochs=epochs, best=best, new=new)


@rubric.command(name="author", epilog="Then:  draco train CONFIG --setting static algorithm.static_rubric=FILE")
def rubric_author(
    config: Annotated[str, typer.Argument(help=f"A preset ({PRESETS}) or a YAML file.")],
    overrides: Overrides = None,
    *,
    out: Path,
    rollouts: Annotated[int, typer.Option(min=1)] = 8,
    tasks: Annotated[int | None, typer.Option(min=1)] = None,
    min_applicability: Annotated[float, typer.Option(min=0, max=1)] = 0.2,
    min_discrimination: Annotated[float, typer.Option(min=0, max=1)] = 0.02,
    trust: Trust = False,
) -> None:
    """Author a static rubric from rollouts of the untrained policy: propose, reduce, measure, prune.

    Args:
        out: YAML file to write.
        rollouts: Rollouts of the untrained policy per task.
        tasks: Only the first N training tasks.
        min_applicability: Minimum share of rollouts to which a criterion applies.
        min_discrimination: Minimum share of tasks whose rollouts a criterion separates.
    """
    from draco_ray.lab.rubric_authoring.author import AuthoringSettings, author_rubric

    loaded = load_config(config, overrides or [], trust=trust)
    idle = {
        "algorithm.rubric": "here, because this command writes the rubric",
        "algorithm.group_size": "here; use --rollouts",
    }
    idle |= {
        "algorithm.static_rubric": "here, because this command writes the rubric",
        "algorithm.rule": "when authoring a rubric",
        **ineffective_judge_keys(loaded),
    }
    check_effective("draco rubric author", overrides or [], tuple(each for each in TRAINING if each != "train"), idle)
    author_rubric(loaded, out, call_with_options(AuthoringSettings, locals()))


@new.command(name="environment")
def new_environment(
    folder: Path,
) -> None:
    """Write an environment: tasks in JSONL, tools as functions, its configuration, and a test that trains one step.

    Args:
        folder: The folder to write.
    """
    from draco_ray.commands.new import new_environment as write

    for path in write(folder):
        typer.echo(path)
    typed = shlex.quote(str(folder / "environment.yaml"))
    typer.echo(f"\npython -m pytest {shlex.quote(str(folder))}")
    typer.echo(f"draco check {typed} model.path=DIR judge.model=openai/gpt-5.4")


@prompts.command(name="import")
def prompts_import(
    source: Path,
    *,
    out: Path,
) -> None:
    """Extract the paper's own prompts from its source, verbatim, into prompt files for judge.prompts.

    Args:
        source: The paper's LaTeX source.
        out: Folder for the prompt files; set judge.prompts to it.
    """
    from draco_ray.commands.import_prompts import import_prompts

    for path in import_prompts(source, out):
        typer.echo(path)


@prompts.command(name="render", epilog="Try:  draco prompts render score      draco prompts render credit --set DIR")
def prompts_render(
    phase: Annotated[str, typer.Argument(parser=parse_phase, metavar="|".join(PHASES))],
    *,
    folder: Annotated[Path, typer.Option("--set")] = Path("prompts/judge"),
) -> None:
    """Show the prompt that a judge would see, for a small invented group of rollouts.

    Args:
        phase: Phase of the judge.
        folder: Folder of the prompt set.
    """
    from draco_ray.judging.prompts import render_phase

    typer.echo(render_phase(phase, project_file(folder)))
