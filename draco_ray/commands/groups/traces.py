"""The command that judges traces of other agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draco_ray.commands.groups.options import ApiBase, Commands, KeyVariable, call_with_options, run_folder
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError

app = Commands()


@app.command(
    epilog="Try:  draco judge traces/ --judge openai/gpt-5.4 --out judged --budget 5      "
    "draco judge traces.jsonl --group-by metadata.task_id --dry-run"
)
def judge(
    paths: Annotated[list[str], typer.Argument(metavar="PATH")],
    *,
    judge: str | None = None,
    out: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    format: str = "auto",
    group_by: Annotated[str | None, typer.Option(metavar="FIELD")] = None,
    mapping: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    rubric: Annotated[str | None, typer.Option(metavar="FILE")] = None,
    budget: Annotated[float | None, typer.Option(min=0)] = None,
    fail_under: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    baseline: Path | None = None,
    github: bool = False,
    release: bool = False,
    replay: bool = False,
    dry_run: bool = False,
    batch: bool = False,
    ray: bool = False,
    api_base: ApiBase = None,
    api_key_env: KeyVariable = None,
    context: Annotated[int | None, typer.Option(min=1000)] = None,
    config: str | None = None,
    override: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
) -> None:
    """Judge traces of any agent: rubric, verdicts with evidence, responsible steps, rewards, step advantages.

    Exit code: 0 all judged, 1 judging stopped, 2 wrong input, 3 below --fail-under or --baseline, 4 some traces could
    not be read or judged.

    Args:
        paths: Trace files, folders, or run directories (or their URLs).
        judge: A LiteLLM model, files:DIR, or rules (offline) (default: the configuration's, openai/gpt-5.4).
        out: Run directory for the results, or its URL; an unfinished one is continued.
        format: Format of the files (docs/judge-traces.md), or auto.
        group_by: Dotted path of the task id in a trace; none: judge each trace alone.
        mapping: YAML mapping of the fields of another format.
        rubric: YAML file with your rubric, or static, which suits AppWorld's code agents (default: the judge writes
            one).
        budget: Maximum cost, in dollars.
        fail_under: Exit with 3 if the pass share under --rubric is lower than this.
        baseline: judged.jsonl of an earlier judgement with the same --rubric; exit with 3 if its pass share was higher
            by more than chance (95 % interval of the difference over common tasks).
        github: Print failed criteria as GitHub Actions annotations, and write a job summary.
        release: Treat unanswered requests of a killed process as not billed, which frees their part of the budget.
        replay: Use the replies recorded in PATH/.replies instead of a judge (default of --out: replayed).
        dry_run: Show what would be judged and the expected cost; send nothing.
        batch: Use the provider's batch API: half the price, up to a day per phase.
        ray: Ask through the judge pool of a Ray cluster (ray.address).
        context: The judge's context length, if unknown, in tokens.
        config: A preset, a YAML file or a run, for judge.* and algorithm.*.
        override: A key of the configuration; may be repeated.
    """
    if replay:
        judge, out = _recorded(paths, judge), out or "replayed"
    options = locals()
    from draco_ray.commands.judge import JudgeArguments, run
    from draco_ray.runs.remote.location import results_folder
    from draco_ray.terminal import console

    with results_folder(None if dry_run else out, console.print) as folder:
        settled = {"config": load_config(config, override or []), "typed": override or [], "out": folder}
        wanted = call_with_options(JudgeArguments, options, paths=[run_folder(path) for path in paths], **settled)
        code = run(wanted)
    if code:
        raise typer.Exit(code)


@app.command(
    name="write-back", epilog="Try:  draco write-back judged --to langfuse --url https://cloud.langfuse.com --dry-run"
)
def write_back(
    judged: Annotated[Path, typer.Argument(metavar="DIR")], *, to: str, url: str, dry_run: bool = False
) -> None:
    """Write verdicts back to the tracing service that the traces came from, as scores that name the blamed steps.

    Args:
        judged: Directory of draco judge, or its judged.jsonl.
        to: langfuse, phoenix, or otlp (OpenTelemetry's evaluation events).
        url: Address of the service, without the API's path.
        dry_run: Print the requests; send nothing.
    """
    from draco_ray.commands.write_back import write_back as send

    send(judged, to, url, dry_run=dry_run)


def _recorded(paths: list[str], judge: str | None) -> str:
    """The judge that answers from the replies recorded beside the traces. Raises: ConfigError: there are no replies."""
    folder = Path(paths[0]) / ".replies"
    if judge is not None:
        raise ConfigError(f"--judge {judge}: no effect with --replay, which uses recorded replies")
    if not folder.is_dir():
        raise ConfigError(
            f"--replay: {folder} does not exist; expected the folder of an earlier --judge files:{folder}"
        )
    return f"files:{folder}"
