"""Commands of the stand-ins: the generated world, the starter policy, the rule judge; and small models."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from draco_ray.commands.groups.options import SANDBOX_ROOT, STARTER_MODEL, Variety, of_variety
from draco_ray.commands.model import app as model
from draco_ray.temp_dirs import PrivateTempDir

app = typer.Typer()
sandbox = typer.Typer(no_args_is_help=True, help="The generated AppWorld world, for machines without AppWorld's data.")
starter = typer.Typer(no_args_is_help=True, help="The starter policy, for machines without model weights.")
app.add_typer(sandbox, name="sandbox")
app.add_typer(starter, name="starter")
app.add_typer(model, name="model")


@sandbox.command(name="build")
def sandbox_build(
    variety: Variety = "standard",
    out: Annotated[
        Path | None, typer.Option(help=f"Folder of the world (default: {SANDBOX_ROOT}; hard: {SANDBOX_ROOT}-hard).")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same world.")] = 0,
    scenarios: Annotated[int | None, typer.Option(help="At most N scenarios per split.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Rebuild an existing world.")] = False,
) -> None:
    """Build a complete AppWorld data root with AppWorld's own models and factories."""
    out = out or of_variety(SANDBOX_ROOT, variety)
    arguments = ["build", "--out", str(out.resolve()), "--seed", str(seed), "--variety", variety]
    arguments += ["--scenarios", str(scenarios)] if scenarios is not None else []
    _in_appworld("draco_ray.sandbox.world", arguments + (["--force"] if force else []))


@sandbox.command(name="verify")
def sandbox_verify(
    root: Annotated[Path, typer.Option(help="The world to verify.")] = SANDBOX_ROOT,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Run every task in AppWorld's engine: the reference solution must pass, doing nothing must fail."""
    _in_appworld("draco_ray.sandbox.world", ["verify", "--root", str(root.resolve()), "--jobs", str(jobs)])


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


@starter.command(name="build")
def starter_build(
    variety: Annotated[
        Literal["standard", "hard"] | None, typer.Option(help="Kind of world (default: standard).")
    ] = None,
    world: Annotated[
        Path | None,
        typer.Option(help=f"World whose training split it learns (default: {SANDBOX_ROOT} or {SANDBOX_ROOT}-hard)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Model directory to write (default: {STARTER_MODEL} or {STARTER_MODEL}-hard).")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed and world give the same model.")] = 0,
) -> None:
    """Train the starter policy on good and faulty scripted rollouts; an existing one is kept."""
    from draco_ray.sandbox.starter import build_starter

    kind = variety or "standard"
    build_starter(
        out or of_variety(STARTER_MODEL, kind),
        world or of_variety(SANDBOX_ROOT, kind),
        seed=seed,
        variety=kind if world is None else variety,
        progress=True,
    )


@app.command(
    name="judge-server",
    epilog="Then:  draco train CONFIG judge.model=openai/rule-judge judge.api_base=http://127.0.0.1:8011/v1",
)
def judge_server(
    use: Annotated[
        str, typer.Option(help="Rules: sandbox, package.module:function or folder/file.py:function.")
    ] = "sandbox",
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8011,
    latency: Annotated[float, typer.Option(help="Seconds per reply.")] = 0.0,
    rate_limit: Annotated[
        float | None, typer.Option(help="Requests a second; others get 429 with Retry-After.")
    ] = None,
    malformed: Annotated[float, typer.Option(help="Share of replies that are not JSON.")] = 0.0,
    truncated: Annotated[float, typer.Option(help="Share of replies cut short.")] = 0.0,
    error: Annotated[float, typer.Option(help="Share of requests answered with 500.")] = 0.0,
    false_pass: Annotated[float, typer.Option(help="Share of FAIL verdicts turned into PASS.")] = 0.0,
    false_fail: Annotated[float, typer.Option(help="Share of PASS verdicts turned into FAIL.")] = 0.0,
    wrong_step: Annotated[float, typer.Option(help="Share of cited steps replaced by another.")] = 0.0,
    missed_criterion: Annotated[float, typer.Option(help="Share of criteria left out.")] = 0.0,
    require_key: Annotated[
        bool, typer.Option("--require-key", help="401 without the key in DRACO_RULE_JUDGE_KEY.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of these shares.")] = 0,
) -> None:
    """Serve the offline rule judge (a stand-in for a frontier judge) as an OpenAI-compatible API."""
    from draco_ray.sandbox.judge_server import serve

    noise = {"false_pass": false_pass, "false_fail": false_fail, "wrong_step": wrong_step, "seed": seed}
    noise["missed_criterion"] = missed_criterion
    faults = {"malformed": malformed, "truncated": truncated, "error": error, "rate_limit": rate_limit}
    serve(use=use, port=port, latency=latency, noise=noise, require_key=require_key, seed=seed, **faults)
