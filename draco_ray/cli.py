"""The ``draco`` command. Heavy packages load only once a command has read its arguments."""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.main import get_command

from draco_ray import __version__
from draco_ray.commands.model import app as model
from draco_ray.commands.tau import Beside, Form, tau
from draco_ray.config.effect import TRAINING, check_effect, check_training, judge_idle
from draco_ray.config.load import load_config, preset_names, project_file, setting_names
from draco_ray.errors import DracoError
from draco_ray.extras import naming_extras
from draco_ray.interruption import ended_as_interrupted
from draco_ray.judging.phases import PHASES
from draco_ray.judging.phases.credit import Credit
from draco_ray.judging.phases.score import Score
from draco_ray.lab.evaluation.rendering import Shown, TableFormat
from draco_ray.temp_dirs import PrivateTempDir

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
sandbox = typer.Typer(no_args_is_help=True, help="The generated AppWorld world, for machines without AppWorld's data.")
starter = typer.Typer(no_args_is_help=True, help="The starter policy, for machines without model weights.")
runs = typer.Typer(no_args_is_help=True, help="Look at finished and running runs.")
app.add_typer(sandbox, name="sandbox")
app.add_typer(starter, name="starter")
prompts = typer.Typer(no_args_is_help=True, help="The judge's prompts.")
app.add_typer(runs, name="runs")
app.add_typer(prompts, name="prompts")
rubric = typer.Typer(no_args_is_help=True, help="The static rubric of the settings without dynamic ones.")
app.add_typer(rubric, name="rubric")
app.add_typer(tau, name="tau")
new = typer.Typer(no_args_is_help=True, help="Begin something of your own.")
app.add_typer(new, name="new")
app.add_typer(model, name="model")

OptionsT = TypeVar("OptionsT")

SANDBOX_ROOT = Path(".cache/sandbox")
STARTER_MODEL = Path(".cache/starter")
Variety = Annotated[
    Literal["standard", "hard"], typer.Option(help="Kind of world; hard: tasks of several apps in more steps.")
]


def _of_variety(path: Path, variety: str) -> Path:
    """Where a variety's world or starter policy is, unless told."""
    return path if variety == "standard" else path.with_name(f"{path.name}-{variety}")


def _taken(kind: type[OptionsT], options: Mapping[str, Any], **others: Any) -> OptionsT:
    """A dataclass of options, from those of the same names in ``options`` (a command's `locals()`), and ``others``."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names} | others)


def _no_effect(context: typer.Context, why: str, *names: str) -> None:
    """Refuse those of these options that were typed. Raises: ConfigError."""
    from draco_ray.errors import ConfigError

    typed = [
        each.opts[0] if each.param_type_name == "option" else "KEY=VALUE"
        for each in context.command.params
        if each.name in names and getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    ]
    if typed:
        raise ConfigError(f"{', '.join(typed)}: no effect {why}")


def _phase(name: str) -> str:
    if name not in PHASES:
        raise typer.BadParameter(f"{name!r} is no judge phase; expected one of {', '.join(PHASES)}")
    return name


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys of the config, e.g. learner.learning_rate=1e-4."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Take programs, endpoints, isolation and places to write from a run directory that others made, too.",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="A run directory, or the URL of its copy in an object store.")
]
Setting = Annotated[
    str | None,
    typer.Option("--setting", "-s", help=f"What is trained: {', '.join(setting_names())}."),
]


ApiBase = Annotated[
    str | None, typer.Option(help="The asked model's endpoint; else the configured one, or its provider's.")
]
KeyVariable = Annotated[
    str | None, typer.Option(help="The variable that holds its key; else the configured one, or <PROVIDER>_API_KEY.")
]


def _run_folder(given: str, *, checkpoints: bool = False) -> Path:
    """The folder of a run that is named by it, or by the URL of its copy in an object store."""
    from draco_ray.runs.remote.place import readable

    return readable(given, checkpoints=checkpoints, say=lambda line: typer.echo(line, err=True))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"draco-ray {__version__}")
        raise typer.Exit


@app.callback()
def draco(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train tool-using agents where nobody can write a checker (DRACO on Ray)."""


@app.command(epilog="Try:  draco train sandbox train.steps=3      draco train sandbox --setting no-credit")
def train(
    config: Annotated[
        str | None,
        typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file; not needed with --resume."),
    ] = None,
    overrides: Overrides = None,
    setting: Setting = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Continue the run of this directory, or of this URL, where it stopped."),
    ] = None,
    resume_or_start: Annotated[
        bool,
        typer.Option("--resume-or-start", help="Continue the run of run.name, or start it where there is none."),
    ] = False,
    allow_changed_config: Annotated[
        bool, typer.Option("--allow-changed-config", help="With --resume: although the configuration has changed.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train a policy; everything it makes is in the run directory it names at the end."""
    from draco_ray.errors import ConfigError

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
        # The first word names the configuration only where there is one to name.
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
    config: Annotated[str | None, typer.Argument(help="A preset or a YAML file; none shows the defaults.")] = None,
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
        Path | None, typer.Option(metavar="FILE", help="The model's config.json, where the model is not here.")
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A throughput, see docs/planning.md; may be repeated.")
    ] = None,
    simulate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Simulate steps of other sizes from what this run recorded.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --simulate: predict this other run's steps as well.")
    ] = None,
    rollouts: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=100_000, help="Rollouts of a simulated step; may be repeated. Default: 96, 1,024 and 16,384."
        ),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Engines of the simulated step. Default: the run's.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="Environment slots of the simulated step. Default: the run's."),
    ] = None,
    judge_workers: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Judge workers of the simulated step. Default: the run's.")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(min=1, help="Judge requests a minute of the simulated step. Default: the run's.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(min=1, help="Judge tokens a minute of the simulated step. Default: the run's.")
    ] = None,
    gpu_dollars: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU for an hour, for the cost of a step.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the simulation.")] = 0,
) -> None:
    """Print the memory of each GPU by kind and the expected time of a step; or simulate steps of a recorded run."""
    from draco_ray.errors import ConfigError

    number = {
        "slots": slots,
        "engines": engines,
        "judge_workers": judge_workers,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    if simulate is None:
        _no_effect(context, "without --simulate RUN", *number, "rollouts", "compare", "gpu_dollars", "seed")
        if config is None:
            raise ConfigError("plan: name CONFIG or --simulate RUN")
        _plan_memory(config, overrides, setting, gpu_memory_gib, model_config, assume)
        return
    if config is not None:
        raise ConfigError(f"plan --simulate: takes its configuration from the run; found {config!r} beside it")
    _no_effect(context, "with --simulate RUN", "setting", "gpu_memory_gib", "model_config", "assume")
    from draco_ray.commands.simulate import simulate_run

    simulate_run(simulate, other=compare, rollouts=rollouts or (), setting=number, seed=seed, gpu_dollars=gpu_dollars)


def _plan_memory(
    config: str,
    overrides: list[str] | None,
    setting: str | None,
    gpu_memory_gib: float,
    model_config: Path | None,
    assume: list[str] | None,
) -> None:
    from draco_ray.commands.plan import plan as print_plan
    from draco_ray.lab.planning.step_time import assumptions

    print_plan(
        load_config(config, overrides or [], setting, trust=True),
        gpu_memory_gib=gpu_memory_gib,
        model_config=model_config,
        given=assumptions(assume or []),
    )


@sandbox.command(name="build")
def sandbox_build(
    variety: Variety = "standard",
    out: Annotated[
        Path | None, typer.Option(help=f"Where the AppWorld data root goes; {SANDBOX_ROOT}[-hard] unless told.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same world.")] = 0,
    scenarios: Annotated[int | None, typer.Option(help="At most so many scenarios per split.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Rebuild a world that is there.")] = False,
) -> None:
    """Build a complete AppWorld data root with AppWorld's own models and factories."""
    out = out or _of_variety(SANDBOX_ROOT, variety)
    arguments = ["build", "--out", str(out.resolve()), "--seed", str(seed), "--variety", variety]
    arguments += ["--scenarios", str(scenarios)] if scenarios is not None else []
    _in_appworld("draco_ray.sandbox.world", arguments + (["--force"] if force else []))


@sandbox.command(name="verify")
def sandbox_verify(
    root: Annotated[Path, typer.Option(help="The world to verify.")] = SANDBOX_ROOT,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Run every task in AppWorld's engine: the reference passes, doing nothing fails."""
    _in_appworld("draco_ray.sandbox.world", ["verify", "--root", str(root.resolve()), "--jobs", str(jobs)])


@starter.command(name="build")
def starter_build(
    variety: Annotated[
        Literal["standard", "hard"] | None, typer.Option(help="Kind of world [standard]; with --world it must be that.")
    ] = None,
    world: Annotated[
        Path | None,
        typer.Option(help=f"The sandbox to learn from (its training split); {SANDBOX_ROOT}[-hard] unless told."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Where the model directory goes; {STARTER_MODEL}[-hard] unless told.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed and world give the same model.")] = 0,
) -> None:
    """Train the starter policy on scripted rollouts, good and faulty; returns at once when it is there already."""
    from draco_ray.sandbox.starter import build_starter

    kind = variety or "standard"
    build_starter(
        out or _of_variety(STARTER_MODEL, kind),
        world or _of_variety(SANDBOX_ROOT, kind),
        seed=seed,
        variety=kind if world is None else variety,
        progress=True,
    )


@new.command(name="environment")
def new_environment(folder: Annotated[Path, typer.Argument(help="The folder to write.")]) -> None:
    """Write an environment: tasks in JSONL, tools as functions, its configuration, and a test that trains one step."""
    from draco_ray.commands.new import new_environment as write

    for path in write(folder):
        typer.echo(path)
    typer.echo(
        f"\npython -m pytest {folder}\ndraco train {folder}/environment.yaml model.path=DIR judge.model=openai/gpt-5.4"
    )


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
    epochs: Annotated[int, typer.Option(min=1, help="Times every demonstration is seen.")] = 3,
    best: Annotated[int, typer.Option(min=1, help="Of a run: rollouts of each task.")] = 1,
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Instead of model.path: a model of under a million weights, a stand-in, from nothing."
        ),
    ] = False,
) -> None:
    """Warm start: fit model.path to demonstrations and write it as a model to train from."""
    from draco_ray.commands.sft import READ, fine_tune, idle_keys

    if not source.is_dir():
        _no_effect(context, "on demonstrations; it is about the rollouts of a run", "best")
    check_effect("draco sft", overrides or [], READ, idle_keys(new=new))
    fine_tune(load_config(config, overrides or []), source, out, epochs=epochs, best=best, new=new)


@app.command(
    name="judge-server",
    epilog="Then:  draco train CONFIG judge.model=openai/rule-judge judge.api_base=http://127.0.0.1:8011/v1",
)
def judge_server(
    use: Annotated[
        str, typer.Option(help="Its rules: sandbox, or your own as package.module:function or folder/file.py:function.")
    ] = "sandbox",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8011,
    latency: Annotated[float, typer.Option(help="Seconds a reply takes.")] = 0.0,
    rate_limit: Annotated[float | None, typer.Option(help="Requests a second; more get 429 + Retry-After.")] = None,
    malformed: Annotated[float, typer.Option(help="Share of replies that are not JSON.")] = 0.0,
    truncated: Annotated[float, typer.Option(help="Share of replies cut short.")] = 0.0,
    error: Annotated[float, typer.Option(help="Share of requests answered with 500.")] = 0.0,
    false_pass: Annotated[float, typer.Option(help="Share of the verdicts FAIL that come out as PASS.")] = 0.0,
    false_fail: Annotated[float, typer.Option(help="Share of the verdicts PASS that come out as FAIL.")] = 0.0,
    wrong_step: Annotated[float, typer.Option(help="Share of cited steps in whose place another is named.")] = 0.0,
    missed_criterion: Annotated[float, typer.Option(help="Share of criteria that are not written.")] = 0.0,
    require_key: Annotated[
        bool, typer.Option("--require-key", help="401 without the key in the variable DRACO_RULE_JUDGE_KEY.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the draws behind the shares.")] = 0,
) -> None:
    """Serve the offline rule judge (a stand-in for a frontier judge) as an OpenAI-compatible API."""
    from draco_ray.sandbox.judge_server import serve

    serve(
        use=use,
        port=port,
        latency=latency,
        rate_limit=rate_limit,
        malformed=malformed,
        truncated=truncated,
        error=error,
        noise={
            "false_pass": false_pass,
            "false_fail": false_fail,
            "wrong_step": wrong_step,
            "missed_criterion": missed_criterion,
            "seed": seed,
        },
        require_key=require_key,
        seed=seed,
    )


@runs.command(name="show")
def runs_show(directory: RunArgument) -> None:
    """Print a run: its setting, one line a step, before and after."""
    from draco_ray.lab.runs.show import show
    from draco_ray.runs.remote.place import checkpoint_steps

    # They are large, and stay in the store: their number is what is shown of them.
    show(_run_folder(directory), checkpoints=checkpoint_steps(directory))


@runs.command(name="cost")
def runs_cost(directory: RunArgument) -> None:
    """Print what judging cost: tokens (cached apart) and dollars by phase and by step."""
    from draco_ray.lab.runs.cost import show_cost

    show_cost(_run_folder(directory))


@runs.command(name="timeline")
def runs_timeline(
    directory: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="A training step.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Write what ran when in a step, for chrome://tracing or ui.perfetto.dev."""
    from draco_ray.lab.runs.timeline import write_timeline

    typer.echo(f"{out}: {write_timeline(_run_folder(directory), step, out)} events")


@runs.command(name="inspect", epilog="Try:  draco runs inspect runs/NAME --out logs      inspect view --log-dir logs")
def runs_inspect(
    directory: Annotated[
        str,
        typer.Argument(help="A run directory, of training or of judged traces, its URL, or an evaluation directory."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the logs, one a step or measurement.")],
) -> None:
    """Write a run, and what was evaluated of it, or one evaluation, as logs of Inspect, for its viewer.

    Rollouts are samples; rewards and verdicts, or whether the task was solved, are their scores."""
    from draco_ray.lab.runs.inspect_evaluations import write_logs

    typer.echo(f"{out}: {len(write_logs(_run_folder(directory), out))} logs")


@app.command(epilog="Try:  draco report runs/NAME      draco report runs/A runs/B --figures --out figures")
def report(
    context: typer.Context,
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR", help="A run directory or its URL, or several to compare.")
    ],
    figures: Annotated[bool, typer.Option("--figures", help="Write the paper's figures as SVG instead.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Write tidy tables as Parquet and CSV instead.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file, or the folder of figures and tables; unless told, inside the (first) run directory."
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine instead; it follows a run that goes on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve; 0 takes a free one.")] = 8321,
) -> None:
    """Write one HTML file to look at a run: what the judge said and where the credit went."""
    from draco_ray.commands.report import serve_page, write
    from draco_ray.errors import ConfigError

    if not serve:
        _no_effect(context, "without --serve", "port")
    if serve:
        if len(directories) > 1 or figures or tables or out is not None:
            raise ConfigError("--serve: the page of one run; expected one DIR, and no --figures, --tables or --out")
        serve_page(_run_folder(directories[0]), port, typer.echo)
        return

    for path in write([_run_folder(each) for each in directories], figures=figures, tables=tables, out=out):
        typer.echo(path)


@app.command(
    epilog="Try:  draco judge traces/ --judge openai/gpt-5.4 --out judged --budget 5      "
    "draco judge traces.jsonl --group-by metadata.task_id --dry-run"
)
def judge(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Files of traces, folders with them, or run directories or their URLs."),
    ],
    judge: Annotated[
        str | None,
        typer.Option(
            help="LiteLLM's name of the judge, or rules, the offline judge; else the configuration's [openai/gpt-5.4]."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run directory for the results, or its URL; the same again goes on there."),
    ] = None,
    format: Annotated[str, typer.Option(help="auto, or the format of all files; docs/judge-traces.md lists them.")] = (
        "auto"
    ),
    group_by: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Dotted path of what names the task of a trace; none: judge each alone."),
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML that says where things are in records of another format.")
    ] = None,
    rubric: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A rubric of your own, or static, instead of one that the judge writes."),
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Dollars that are not exceeded.")] = None,
    fail_under: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 3 if the pass share under --rubric is below.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="judged.jsonl of an earlier judgement under the same --rubric; exit with 3 if it was better."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what was understood and what it will cost; ask nothing."),
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="The provider's batch API: half the price, up to a day for each phase.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ask through the judge pool of a Ray cluster (ray.address, or started here).")
    ] = False,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    context: Annotated[int | None, typer.Option(min=1000, help="Tokens that the judge reads, where unknown.")] = None,
    config: Annotated[
        str | None, typer.Option(help="A preset, a YAML file or a run, whose judge.* and algorithm.* to take.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of it; may be repeated.")
    ] = None,
) -> None:
    """Judge traces of any agent: rubric, verdicts with evidence, the steps responsible, rewards, step advantages.

    Exit code: 0 all judged, 3 below --fail-under or --baseline, 4 some traces could not be read or judged.
    """
    options = locals()
    from draco_ray.commands.judge import Wanted, run
    from draco_ray.runs.remote.place import results_folder
    from draco_ray.terminal import PlainConsole

    console = PlainConsole(width=120)
    with results_folder(None if dry_run else out, console.print) as folder:
        settled = {"config": load_config(config, override or []), "typed": override or [], "out": folder}
        wanted = _taken(Wanted, options, paths=[_run_folder(path) for path in paths], **settled)
        code = run(wanted, console)
    if code:
        raise typer.Exit(code)


@app.command(
    epilog="Try:  draco replay runs/NAME      draco replay runs/NAME --judge openai/gpt-5.4-mini --step 1 --step 50"
)
def replay(
    context: typer.Context,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A run directory or its URL; it is not changed but for --out.")
    ],
    judge: Annotated[
        str | None,
        typer.Option(
            help="Ask this LiteLLM model (or rules, the offline judge; own, the run's judge again; policy, the "
            "checkpoint of the step before) instead of running advantage rules."
        ),
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option("--step", min=1, help="Only this training step; may be repeated.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", help="Only this advantage rule, as of algorithm.rule; may be repeated."),
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            "--phase",
            parser=_phase,
            metavar="|".join(PHASES),
            help="With --judge: which of its calls; may be repeated; score and credit unless told.",
        ),
    ] = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    pairing: Annotated[
        str | None,
        typer.Option(help="With --phase stage1, stage2 or union: the third model that compares criteria, or rules."),
    ] = None,
    pairing_api_base: ApiBase = None,
    pairing_api_key_env: KeyVariable = None,
    static_rubric: Annotated[
        Path | None,
        typer.Option(help="With --judge: score the recorded rollouts against this rubric, and no --phase unless told."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the tables; unless told, replay in the run.")] = None,
    trust: Trust = False,
) -> None:
    """Run advantage rules over recorded verdicts, or send archived judge calls to another judge."""
    from draco_ray.commands.replay import replay_algorithm, replay_judge
    from draco_ray.lab.analysis.judges import NamedJudge
    from draco_ray.terminal import PlainConsole

    console = PlainConsole(width=120)
    if judge is None:
        _no_effect(context, "without --judge MODEL", "phase", "api_base", "api_key_env", "pairing", "static_rubric")
    else:
        _no_effect(context, "with --judge, which asks about verdicts only", "rule")
    if pairing is None:
        _no_effect(context, "without --pairing MODEL", "pairing_api_base", "pairing_api_key_env")
    folder = _run_folder(directory, checkpoints=judge == "policy")
    if judge is None:
        written = replay_algorithm(folder, rules=rule or None, steps=step, out=out, console=console)
    else:
        written = replay_judge(
            folder,
            judge=NamedJudge(model=judge, api_base=api_base, api_key_env=api_key_env),
            pairing=None
            if pairing is None
            else NamedJudge(model=pairing, api_base=pairing_api_base, api_key_env=pairing_api_key_env),
            phases=phase or ([] if static_rubric else [Score.name, Credit.name]),
            steps=step,
            static_rubric=static_rubric,
            out=out,
            console=console,
            trust=trust,
        )
    for path in written:
        typer.echo(path)


@app.command(
    epilog="Try:  draco agreement labels.jsonl      draco agreement labels.jsonl --run runs/NAME --judge "
    "openai/gpt-5.4-mini"
)
def agreement(
    context: typer.Context,
    labels: Annotated[list[Path], typer.Argument(metavar="FILE", help="Labels exported from draco report's page.")],
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The labelled run: try examples of corrected verdicts.")
    ] = None,
    judge: Annotated[
        str, typer.Option(help="With --run: LiteLLM's name of a judge, own (the run's), or rules, the offline judge.")
    ] = "own",
    examples: Annotated[int, typer.Option(min=1, help="With --run: most corrected verdicts to show.")] = 12,
    folds: Annotated[int, typer.Option(min=2, help="With --run: parts, each judged with the others' examples.")] = 4,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables; none are written unless told.")] = None,
    trust: Trust = False,
) -> None:
    """Measure a judge against people's labels, and what examples of corrected verdicts change."""
    from draco_ray.commands.agreement import Held
    from draco_ray.commands.agreement import agreement as measure
    from draco_ray.lab.analysis.judges import NamedJudge
    from draco_ray.terminal import PlainConsole

    held = None
    if run is not None:
        named = NamedJudge(model=judge, api_base=api_base, api_key_env=api_key_env)
        held = Held(run=run, judge=named, examples=examples, folds=folds, trust=trust)
    else:
        asked = ("judge", "examples", "folds", "api_base", "api_key_env")
        _no_effect(context, "without --run DIR, whose prompts are asked again", *asked)
    for path in measure(labels, held, out=out, console=PlainConsole(width=120)):
        typer.echo(path)


@app.command(
    name="attribution-bench",
    epilog="Try:  draco attribution-bench --tasks 5      draco attribution-bench --run runs/NAME --judge "
    "openai/gpt-5.4-mini",
)
def attribution_bench(
    context: typer.Context,
    judge: Annotated[
        str | None,
        typer.Option(
            help="LiteLLM model, own (that of --config or --run), or rules, the offline judge in this process; else "
            "the one that --config names, else rules."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Plant faults in this run's successful rollouts, not in reference solutions."),
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option("--step", min=1, help="With --run: only this training step; may be repeated.")
    ] = None,
    world: Annotated[
        Path | None,
        typer.Option(help=f"The sandbox with the tasks; unless told, the run's data.root, or {SANDBOX_ROOT}."),
    ] = None,
    split: Annotated[str, typer.Option(help="Without --run: its tasks.")] = "test_normal",
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Only so many tasks; families in turn without --run.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A preset, a YAML file or a run, for the judge's prompts, sampling and limits.")
    ] = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    wrong_step: Annotated[
        float, typer.Option(min=0, max=1, help="With --judge rules: share of citations that name another step.")
    ] = 0.0,
    processes: Annotated[int, typer.Option(min=1, help="AppWorld processes.")] = 2,
    out: Annotated[
        Path, typer.Option(help="Folder of the tables; executed rollouts that are there are used again.")
    ] = Path("attribution"),
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="No faults: measure the judges whose step labels are in this JSON file."),
    ] = None,
    splits: Annotated[
        int, typer.Option(min=1, help="With --labels: splits of its questions that try the reliability.")
    ] = 200,
    trust: Trust = False,
) -> None:
    """Plant known faults in scripted rollouts: does the judge find them, and does credit push the right steps?"""
    from draco_ray.commands.attribution_bench import Solutions, attribution_labels
    from draco_ray.commands.attribution_bench import attribution_bench as run_bench
    from draco_ray.lab.analysis.judges import NamedJudge, names_judge
    from draco_ray.terminal import PlainConsole

    if labels is not None:
        used = ("labels", "splits", "out")
        _no_effect(context, "with --labels FILE", *(name for name in context.params if name not in used))
        for path in attribution_labels(labels, splits=splits, out=out, console=PlainConsole(width=140)):
            typer.echo(path)
        return
    _no_effect(context, "without --labels FILE", "splits")
    if run is None:
        _no_effect(context, "without --run DIR", "step")
    else:
        _no_effect(context, "with --run DIR, whose rollouts are taken", "split")
    if judge is None:
        judge = "own" if config is not None and names_judge(load_config(config, trust=True)) else "rules"
    written = run_bench(
        Solutions(
            run=run, steps=step, world=world, sandbox=SANDBOX_ROOT, split=split, tasks=tasks, processes=processes
        ),
        judge=NamedJudge(model=judge, api_base=api_base, api_key_env=api_key_env),
        config=config,
        out=out,
        console=PlainConsole(width=120),
        wrong_step=wrong_step,
        trust=trust,
    )
    for path in written:
        typer.echo(path)


@app.command(
    epilog="Try:  draco evaluate --policy starter --split dev --runs 3 data.eval_tasks=4      "
    "draco evaluate --run runs/NAME --last-epochs 3      draco evaluate --policy litellm:openai/gpt-5.4 --split "
    "test_normal --runs 1"
)
def evaluate(
    overrides: Overrides = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help="A model directory or hub name, a run (its last checkpoint), a checkpoint or adapter, starter, or an "
            "API model as litellm:MODEL.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="DIR", help="A run or its URL, for the options below.")
    ] = None,
    last_epochs: Annotated[
        int | None, typer.Option(min=1, help="With --run: the mean over its last so many epoch checkpoints [3].")
    ] = None,
    train_curve: Annotated[
        bool, typer.Option("--train-curve", help="With --run: success on the training split by checkpoint.")
    ] = False,
    every: Annotated[
        int | None, typer.Option(min=1, help="With --train-curve: every so many training steps [1].")
    ] = None,
    benchmark: Annotated[
        Literal["appworld", "tau-banking"], typer.Option(help="docs/tau_bench.md is about the second.")
    ] = "appworld",
    split: Annotated[str | None, typer.Option(help="AppWorld's dataset; else data.eval_split.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Independent rollouts per task [3].")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="A preset, a YAML file or a run; else the run's own, sandbox for starter, or the defaults."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Evaluation directory; an unfinished one of the same plan is continued.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The setting's name in tables.")] = None,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    api_temperature: Annotated[float | None, typer.Option(help="API model: else the provider's default.")] = None,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors", help="Play again what was lost: crashed worlds, an endpoint that did not answer."
        ),
    ] = False,
    trust: Trust = False,
) -> None:
    """Measure a policy by the benchmark's own evaluator; the same command again goes on where it was interrupted.

    Of an environment without one the judge's pass rate stands in, and is called so."""
    from draco_ray.commands.evaluate import EvaluateOptions
    from draco_ray.commands.evaluate import evaluate as run_evaluation
    from draco_ray.errors import ConfigError
    from draco_ray.runs.remote.place import is_url

    if is_url(run) and out is None:
        raise ConfigError(f"--run {run}: --out DIR says where the evaluation of a run in an object store goes")
    if is_url(policy):
        policy = str(_run_folder(policy or "", checkpoints=True))
    options = _taken(
        EvaluateOptions,
        locals(),
        run=None if run is None else _run_folder(run, checkpoints=True),
        overrides=overrides or [],
    )
    if benchmark == "tau-banking":
        from draco_ray.commands.tau import evaluate as run_tau_bench

        run_tau_bench(options, STARTER_MODEL)
        return
    run_evaluation(options, STARTER_MODEL)


@app.command(
    name="eval-set",
    epilog="Try:  draco eval-set evaluations.yaml --against Base      draco eval-set --setting Base=starter --setting "
    "DRACO=runs/NAME --split dev --split test_normal --out evaluations/both",
)
def eval_set(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY=VALUE]...", help="A YAML file (docs/evaluation.md), and configuration keys."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=POLICY",
            help="A row: a run directory (its last epochs; several of one label are its seeds), or what --policy of "
            "draco evaluate takes. May be repeated.",
        ),
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="A split of the environment, or tau-banking. May be repeated.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Independent rollouts per task [3].")] = None,
    last_epochs: Annotated[
        int | None, typer.Option(min=1, help="Of runs: the mean over the last so many epoch checkpoints [3].")
    ] = None,
    max_lost_share: Annotated[
        float | None, typer.Option(min=0, max=1, help="Stop when an evaluation lost more of its rollouts [0.05].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the set; unless told, evaluations/ and FILE's name.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare every other setting with this one, paired.")] = None,
    form: Form = TableFormat.TEXT,
    show: Beside = Shown.INTERVAL,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Play again what was lost.")] = False,
    trust: Trust = False,
) -> None:
    """Measure several settings on several splits and benchmarks, and print their table.

    The same command again goes on where it was stopped, and another configuration is refused. Exit code: 0 all
    finished, 1 an evaluation failed, 2 what was typed cannot be used, 3 too many rollouts were lost, 130 Ctrl-C."""
    from draco_ray.commands.eval_set import EvalSetOptions, evaluate_set

    lists = {"words": words or [], "settings": setting or [], "splits": split or []}
    options = _taken(EvalSetOptions, locals(), shown=show, **lists)
    evaluate_set(options, STARTER_MODEL)


@app.command(epilog="Try:  draco reevaluate evaluations/starter-appworld-dev data.root=.cache/sandbox")
def reevaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An evaluation directory.")],
    overrides: Overrides = None,
    config: Annotated[str | None, typer.Option(help="A preset or a YAML file; else sandbox or the defaults.")] = None,
) -> None:
    """Have AppWorld's evaluator judge the worlds of an evaluation again, in the jail; exit code 1 where it differs."""
    from draco_ray.commands.evaluate import reevaluate as evaluate_again

    check_effect("draco reevaluate", overrides or [], ("data.root", "environment"), {})
    if not evaluate_again(directory, config, overrides or []):
        raise typer.Exit(1)


@app.command(
    epilog="Try:  draco tables Base=evaluations/base DRACO=evaluations/draco --against Base --table main --show std"
)
def tables(
    context: typer.Context,
    directories: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]DIR",
            help="Evaluation directories; equal labels make one row, BLOCK::LABEL puts it into a block.",
        ),
    ],
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            help="main, efficiency, difficulty, frontier, self-judge, consistency, retention, cost or terminations; "
            "may be repeated; all unless told.",
        ),
    ] = None,
    form: Form = TableFormat.TEXT,
    show: Beside = Shown.NOTHING,
    against: Annotated[str | None, typer.Option(help="Compare every other setting with this one, paired.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write every table to, in every format.")] = None,
) -> None:
    """Print evaluated settings side by side as the paper's tables."""
    from draco_ray.commands.evaluate import print_tables

    if out is not None:
        _no_effect(context, "with --out, where every format is written", "form")
    print_tables(directories, tables=table or [], form=form, shown=show, against=against, out=out)


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
    phase: Annotated[str, typer.Argument(help="The judge's job.", parser=_phase, metavar="|".join(PHASES))],
    folder: Annotated[Path, typer.Option("--set", help="Folder of the prompt set.")] = Path("prompts/judge"),
) -> None:
    """Show what a judge would see, on a small invented group of rollouts."""
    from draco_ray.judging.prompts import render_phase

    typer.echo(render_phase(phase, project_file(folder)))


@rubric.command(
    name="author",
    epilog="Then:  draco train CONFIG --setting static algorithm.static_rubric=FILE",
)
def rubric_author(
    config: Annotated[str, typer.Argument(help=f"A preset ({', '.join(preset_names())}) or a YAML file.")],
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    overrides: Overrides = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of the untrained policy per task.")] = 8,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only the first so many training tasks.")] = None,
    min_applicability: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rollouts a criterion must apply to.")
    ] = 0.2,
    min_discrimination: Annotated[
        float, typer.Option(min=0, max=1, help="Share of tasks whose rollouts a criterion must tell apart.")
    ] = 0.02,
    trust: Trust = False,
) -> None:
    """Author a static rubric from rollouts of the untrained policy: propose, reduce, measure, prune."""
    from draco_ray.lab.rubric_authoring.author import AuthoringSettings, author_rubric

    loaded = load_config(config, overrides or [], trust=trust)
    idle = {"algorithm.rubric": "here: one is written", "algorithm.group_size": "here; --rollouts says it"}
    idle |= {"algorithm.static_rubric": "here: one is written", "algorithm.rule": "on a rubric", **judge_idle(loaded)}
    check_effect("draco rubric author", overrides or [], tuple(each for each in TRAINING if each != "train"), idle)
    author_rubric(loaded, out, _taken(AuthoringSettings, locals()))


def _in_appworld(module: str, arguments: list[str]) -> None:
    from draco_ray.environments.appworld.interpreter import appworld_python
    from draco_ray.environments.jail import linux
    from draco_ray.environments.jail.launch import link_package

    with PrivateTempDir() as folder:
        environment = {**os.environ, "PYTHONPATH": link_package(folder / "program"), "PYTHONUNBUFFERED": "1"}
        result = subprocess.run(
            [appworld_python(None), "-P", "-m", module, *arguments],
            env=environment,
            check=False,
            preexec_fn=linux.die_with_parent,
        )
    if result.returncode:
        raise typer.Exit(result.returncode)


@functools.cache
def _commands() -> Any:
    """Every command, its options read from its signature: built once, however often a process calls `main`."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a known error is one line and exit code 1 (2 for what the user typed, 3 for `TooManyLost`).

    ``arguments`` are the words after ``draco``; None takes them from the command line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal of ASCII or Latin-1 shows a question mark for what it lacks.
            stream.reconfigure(errors="replace")
    if arguments is None:
        # While large packages are imported almost nothing is garbage; every 700 objects it was looked for.
        gc.set_threshold(50_000, 20, 20)
    try:
        with naming_extras(), ended_as_interrupted():
            _commands()(arguments, prog_name="draco")
    except DracoError as error:
        from draco_ray.terminal import plain

        # One line, whatever was typed or received.
        print(f"draco: {plain(' '.join(str(error).splitlines()))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        # Before or after the command itself, which Typer ends so.
        sys.exit(130)


if __name__ == "__main__":
    main()
