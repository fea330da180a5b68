"""Commands of the stand-ins: the generated world, the starter policy, the rule judge; and small models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from draco_ray.commands.groups.options import SANDBOX_ROOT, STARTER_MODEL, Commands, Variety, variety_folder
from draco_ray.commands.model import app as model
from draco_ray.temp_dirs import PrivateTempDir

app = Commands()
sandbox = Commands(no_args_is_help=True, help="The generated AppWorld world, for machines without AppWorld's data.")
starter = Commands(no_args_is_help=True, help="The starter policy, for machines without model weights.")
app.add_typer(sandbox, name="sandbox")
app.add_typer(starter, name="starter")
app.add_typer(model, name="model")


@sandbox.command(name="build")
def sandbox_build(
    *,
    variety: Variety = "standard",
    out: Path | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    scenarios: Annotated[int | None, typer.Option(min=1)] = None,
    force: bool = False,
) -> None:
    """Build a complete AppWorld data root with AppWorld's own models and factories.

    Args:
        out: Folder of the world (default: .cache/sandbox; hard: .cache/sandbox-hard).
        seed: The same seed gives the same world.
        scenarios: At most N scenarios per split.
        force: Rebuild an existing world.
    """
    from draco_ray.environments.appworld.interpreter import appworld_python
    from draco_ray.environments.jail import linux
    from draco_ray.environments.jail.launch import link_package

    out = out or variety_folder(SANDBOX_ROOT, variety)
    arguments = {"out": str(out.resolve()), "seed": seed, "variety": variety, "limit": scenarios, "force": force}
    with PrivateTempDir() as folder:
        environment = {**os.environ, "PYTHONPATH": link_package(folder / "program"), "PYTHONUNBUFFERED": "1"}
        result = subprocess.run(
            [appworld_python(None), "-P", "-m", "draco_ray.sandbox.world", json.dumps(arguments)],
            env=environment,
            check=False,
            preexec_fn=linux.die_with_parent,
        )
    if result.returncode:
        raise typer.Exit(result.returncode)


@sandbox.command(name="verify")
def sandbox_verify(
    *,
    root: Path = SANDBOX_ROOT,
    jobs: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Run every task in AppWorld's engine; check that the reference solution passes and that doing nothing fails.

    Args:
        root: The world to verify.
        jobs: Number of processes.
    """
    from draco_ray.sandbox.world.verify import verify

    failing = verify(root.resolve(), jobs)
    print("verify: all tasks passed the checks" if not failing else f"verify: {len(failing)} failing tasks")
    if failing:
        raise typer.Exit(1)


@starter.command(name="build")
def starter_build(
    *,
    variety: Literal["standard", "hard"] | None = None,
    world: Path | None = None,
    out: Path | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Train the starter policy on good and faulty scripted rollouts; an existing one is kept.

    Args:
        variety: Kind of world (default: standard).
        world: World whose training split it learns (default: .cache/sandbox or .cache/sandbox-hard).
        out: Model directory to write (default: .cache/starter or .cache/starter-hard).
        seed: The same seed and world give the same model.
    """
    from draco_ray.sandbox.starter import build_starter

    kind = variety or "standard"
    build_starter(
        out or variety_folder(STARTER_MODEL, kind),
        world or variety_folder(SANDBOX_ROOT, kind),
        seed=seed,
        variety=kind if world is None else variety,
        progress=True,
    )


@app.command(
    name="judge-server",
    epilog="Then:  draco train CONFIG judge.model=openai/rule-judge judge.api_base=http://127.0.0.1:8011/v1",
)
def judge_server(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8011,
    latency: Annotated[float, typer.Option(min=0)] = 0.0,
) -> None:
    """Serve the offline rule judge (a stand-in for a frontier judge) as an OpenAI-compatible API.

    Args:
        port: Port on 127.0.0.1.
        latency: Seconds per reply.
    """
    from draco_ray.sandbox.judge_server import serve

    serve(port=port, latency=latency)
