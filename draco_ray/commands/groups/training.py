"""Commands that train a policy or prepare it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import Overrides, Setting, Trust, check_no_effect, options_of, parse_phase
from draco_ray.config.effect import TRAINING, check_effect, check_training, judge_idle
from draco_ray.config.load import load_config, preset_names, project_file
from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES

app = typer.Typer()
new = typer.Typer(no_args_is_help=True, help="Write a template to start from.")
prompts = typer.Typer(no_args_is_help=True, help="The judge's prompts.")
rubric = typer.Typer(no_args_is_help=True, help="Static rubrics, for settings without dynamic rubrics.")
app.add_typer(new, name="new")
app.add_typer(prompts, name="prompts")
app.add_typer(rubric, name="rubric")


@app.command(epilog="Try:  draco train sandbox train.steps=3      draco train sandbox --setting no-credit")
def train(
    config: Annotated[
        str | None,
        typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file; not needed with --resume."),
    ] = None,
    overrides: Overrides = None,
    setting: Setting = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Continue the run in this directory, or at this URL.")
    ] = None,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Continue the run run.name, or start it if there is none.")
    ] = False,
    allow_changed_config: Annotated[
        bool, typer.Option("--allow-changed-config", help="With --resume: accept a changed configuration.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train a policy; all results are in the run directory that is printed at the end."""
    overrides = overrides or []
    if resume is not None and resume_or_start:
        raise ConfigError("--resume DIR or --resume-or-start, which takes run.name: not both")
    if resume is None:
        if config is None:
            raise ConfigError(f"train: name a preset ({', '.join(preset_names())}) or a YAML file, or --resume a run")
        if resume_or_start:
            from draco_ray.training.run import resume_or_start as run_on

            loaded = load_config(config, overrides, setting, trust=trust)
            check_training(overrides, loaded)
            _say_how_sure(run_on(loaded, config, overrides, setting, allow_changed=allow_changed_config, trust=trust))
            return
        if allow_changed_config:
            raise ConfigError("--allow-changed-config: only together with --resume DIR")
        from draco_ray.training.run import train as run_training

        loaded = load_config(config, overrides, setting, trust=trust)
        check_training(overrides, loaded)
        _say_how_sure(run_training(loaded))
        return
    if config is not None and "=" in config:
        # With --resume, the first word is an override.
        overrides = [config, *overrides]
        config = None
    from draco_ray.training.run import resume as resume_training

    _say_how_sure(resume_training(resume, config, overrides, setting, allow_changed=allow_changed_config, trust=trust))


def _say_how_sure(run: Path) -> None:
    """Print the intervals of what a run gained, where it was evaluated before and after."""
    from draco_ray.lab.evaluation.setting import gain_of
    from draco_ray.runs.directory import RunDirectory

    if (line := gain_of(RunDirectory.open(run))) is not None:
        typer.echo(line)


@app.command(name="config", epilog="Try:  draco config sandbox      draco config sandbox --setting static")
def show_config(
    config: Annotated[
        str | None, typer.Argument(help="A preset or a YAML file; without one, the defaults are shown.")
    ] = None,
    overrides: Overrides = None,
    setting: Setting = None,
    keys: Annotated[bool, typer.Option("--keys", help="Every key with its type, value and meaning.")] = False,
) -> None:
    """Print the configuration a run would use."""
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
    config: Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")],
    overrides: Overrides = None,
    setting: Setting = None,
    trust: Trust = False,
) -> None:
    """List everything that would stop a run of this configuration on this machine, and what to set instead."""
    from draco_ray.commands.check import check

    loaded = load_config(config, overrides or [], setting, trust=trust)
    check_training(overrides or [], loaded)
    check(loaded)


@app.command(
    epilog="Try:  draco plan qwen3.6-27b --gpu-memory-gib 140      draco plan --simulate runs/NAME --rollouts 1024"
)
def plan(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")
    ] = None,
    overrides: Overrides = None,
    setting: Setting = None,
    gpu_memory_gib: Annotated[float, typer.Option(min=1, help="Memory of one GPU, GiB.")] = 80,
    model_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's config.json, if the model is elsewhere.")
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A throughput (docs/planning.md); may be repeated.")
    ] = None,
    simulate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Simulate steps of other sizes from this run.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --simulate: also predict this run's steps.")
    ] = None,
    rollouts: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=100_000, help="Rollouts of a simulated step; may be repeated (default: 96, 1024, 16384)."
        ),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Simulated engines (default: the run's).")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Simulated environment slots (default: the run's).")
    ] = None,
    judge_workers: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Simulated judge workers (default: the run's).")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(min=1, help="Simulated judge requests a minute (default: the run's).")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(min=1, help="Simulated judge tokens a minute (default: the run's).")
    ] = None,
    staleness: Annotated[
        list[int] | None,
        typer.Option(min=0, max=16, help="Print throughput on 8 to 512 GPUs at this train.staleness; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the simulation.")] = 0,
) -> None:
    """Print the memory that each GPU needs and the expected time of a step, or simulate steps of a recorded run."""
    number = {
        "slots": slots,
        "engines": engines,
        "judge_workers": judge_workers,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    if simulate is None:
        check_no_effect(context, "without --simulate RUN", *number, "rollouts", "compare", "staleness", "seed")
        if config is None:
            raise ConfigError("plan: name CONFIG or --simulate RUN")
        from draco_ray.commands.plan import plan as print_plan
        from draco_ray.lab.planning.step_time import assumptions

        resolved, given = load_config(config, overrides or [], setting, trust=True), assumptions(assume or [])
        print_plan(resolved, gpu_memory_gib=gpu_memory_gib, model_config=model_config, given=given)
        return
    if config is not None:
        raise ConfigError(f"plan --simulate: takes its configuration from the run; found {config!r} beside it")
    check_no_effect(context, "with --simulate RUN", "setting", "gpu_memory_gib", "model_config", "assume")
    from draco_ray.commands.simulate import simulate_run

    simulate_run(simulate, other=compare, rollouts=rollouts or (), setting=number, staleness=staleness or (), seed=seed)


@app.command(
    epilog="Try:  draco sft shop/environment.yaml shop/demonstrations.jsonl --out warm model.path=DIR      "
    "draco sft CONFIG runs/NAME --best 2 --out warm"
)
def sft(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}), a YAML file or a run.")],
    source: Annotated[Path, typer.Argument(help="JSONL of messages, or a run directory for its best rollouts.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Where the model directory goes.")] = Path("sft"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the demonstrations.")] = 3,
    best: Annotated[int, typer.Option(min=1, help="With a run: best rollouts to take of each task.")] = 1,
    new: Annotated[
        bool, typer.Option("--new", help="Start from a tiny untrained stand-in model instead of model.path.")
    ] = False,
) -> None:
    """Warm start: fine-tune model.path on demonstrations and write a model to train from."""
    from draco_ray.commands.sft import READ, fine_tune, idle_keys

    if not source.is_dir():
        check_no_effect(context, "on demonstrations; it selects rollouts of a run", "best")
    loaded = load_config(config, overrides or [])
    check_effect("draco sft", overrides or [], READ, idle_keys(loaded, new=new))
    fine_tune(loaded, source, out, epochs=epochs, best=best, new=new)


@rubric.command(name="author", epilog="Then:  draco train CONFIG --setting static algorithm.static_rubric=FILE")
def rubric_author(
    config: Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")],
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    overrides: Overrides = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of the untrained policy per task.")] = 8,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only the first N training tasks.")] = None,
    min_applicability: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rollouts that a criterion must apply to.")
    ] = 0.2,
    min_discrimination: Annotated[
        float, typer.Option(min=0, max=1, help="Share of tasks where a criterion must separate rollouts.")
    ] = 0.02,
    trust: Trust = False,
) -> None:
    """Author a static rubric from rollouts of the untrained policy: propose, reduce, measure, prune."""
    from draco_ray.lab.rubric_authoring.author import AuthoringSettings, author_rubric

    loaded = load_config(config, overrides or [], trust=trust)
    idle = {"algorithm.rubric": "here: one is written", "algorithm.group_size": "here; --rollouts says it"}
    idle |= {"algorithm.static_rubric": "here: one is written", "algorithm.rule": "on a rubric", **judge_idle(loaded)}
    check_effect("draco rubric author", overrides or [], tuple(each for each in TRAINING if each != "train"), idle)
    author_rubric(loaded, out, options_of(AuthoringSettings, locals()))


@new.command(name="environment")
def new_environment(folder: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Write an environment: tasks in JSONL, tools as functions, its configuration, and a test that trains one step."""
    from draco_ray.commands.new import new_environment as write

    for path in write(folder):
        typer.echo(path)
    typer.echo(
        f"\npython -m pytest {folder}\ndraco check {folder}/environment.yaml model.path=DIR judge.model=openai/gpt-5.4"
    )


@prompts.command(name="import")
def prompts_import(
    source: Annotated[Path, typer.Argument(help="The paper's LaTeX source.")],
    out: Annotated[Path, typer.Option(help="Folder for the prompt files; give it to judge.prompts.")],
) -> None:
    """Extract the paper's own prompts from its source, verbatim, into the file names this project uses."""
    from draco_ray.commands.import_prompts import import_prompts

    for path in import_prompts(source, out):
        typer.echo(path)


@prompts.command(name="render", epilog="Try:  draco prompts render score      draco prompts render credit --set DIR")
def prompts_render(
    phase: Annotated[str, typer.Argument(help="The judge's job.", parser=parse_phase, metavar="|".join(PHASES))],
    folder: Annotated[Path, typer.Option("--set", help="Folder of the prompt set.")] = Path("prompts/judge"),
) -> None:
    """Show what a judge would see, on a small invented group of rollouts."""
    from draco_ray.judging.prompts import render_phase

    typer.echo(render_phase(phase, project_file(folder)))
