"""The command that judges traces of other agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import ApiBase, KeyVariable, options_of, run_folder
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError

app = typer.Typer()


@app.command(
    epilog="Try:  draco judge traces/ --judge openai/gpt-5.4 --out judged --budget 5      "
    "draco judge traces.jsonl --group-by metadata.task_id --dry-run"
)
def judge(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Trace files, folders, or run directories or their URLs.")
    ],
    judge: Annotated[
        str | None,
        typer.Option(
            help="A LiteLLM model, files:DIR, or rules (offline) (default: the configuration's, openai/gpt-5.4)."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run directory for the results, or its URL; an unfinished one is continued."),
    ] = None,
    format: Annotated[str, typer.Option(help="Format of the files (docs/judge-traces.md), or auto.")] = ("auto"),
    group_by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Dotted path of the task id in a trace; none: judge each alone.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML mapping of the fields of another format.")
    ] = None,
    rubric: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your own rubric, or static (default: the judge writes one).")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Most dollars to spend.")] = None,
    fail_under: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit with 3 if the pass share under --rubric is below.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="judged.jsonl of an earlier judgement under the same --rubric; exit with 3 if it was better."
        ),
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print failed traces as annotations of GitHub Actions, and a summary.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Count requests that a killed process left unanswered as not billed.")
    ] = False,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Take the replies recorded in PATH/.replies (--out: default replayed)."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be judged and the expected cost; send nothing.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="Use the provider's batch API: half the price, up to a day per phase.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ask through the judge pool of a Ray cluster (ray.address).")
    ] = False,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    context: Annotated[
        int | None, typer.Option(min=1000, help="The judge's context length, if unknown, in tokens.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="A preset, a YAML file or a run, for judge.* and algorithm.*.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the configuration; may be repeated."),
    ] = None,
) -> None:
    """Judge traces of any agent: rubric, verdicts with evidence, responsible steps, rewards, step advantages.

    Exit code: 0 all judged, 1 judging stopped, 2 wrong input, 3 below --fail-under or --baseline, 4 some traces could
    not be read or judged.
    """
    if replay:
        judge, out = _recorded(paths, judge), out or "replayed"
    options = locals()
    from draco_ray.commands.judge import JudgeArguments, run
    from draco_ray.runs.remote.place import results_folder
    from draco_ray.terminal import PlainConsole

    console = PlainConsole(width=120)
    with results_folder(None if dry_run else out, console.print) as folder:
        settled = {"config": load_config(config, override or []), "typed": override or [], "out": folder}
        wanted = options_of(JudgeArguments, options, paths=[run_folder(path) for path in paths], **settled)
        code = run(wanted, console)
    if code:
        raise typer.Exit(code)


def _recorded(paths: list[str], judge: str | None) -> str:
    """The judge that answers from the recorded replies beside the traces. Raises: ConfigError: there are none."""
    folder = Path(paths[0]) / ".replies"
    if judge is not None:
        raise ConfigError(f"--judge {judge}: no effect with --replay, which takes recorded replies")
    if not folder.is_dir():
        raise ConfigError(f"--replay: {folder} is missing; expected the replies of an earlier --judge files:{folder}")
    return f"files:{folder}"
