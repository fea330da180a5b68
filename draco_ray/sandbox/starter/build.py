"""Builds the starter policy: demonstrations, tokenizer, training, model directory. All or nothing, and cached.

PyTorch and AppWorld are imported or started only when there is something to build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draco_ray.config.load import load_config
from draco_ray.config.machine import set_threads
from draco_ray.config.schema import AgentConfig
from draco_ray.environments.appworld.data_root import check_data_root, load_split, load_task
from draco_ray.environments.appworld.environment import AppWorldEnvironment
from draco_ray.errors import ConfigError, WorldError
from draco_ray.extras import require_package
from draco_ray.records import Task
from draco_ray.rollout.agent import find_prompt
from draco_ray.sandbox.starter import demonstrations as demo
from draco_ray.sandbox.starter.settings import StarterSettings, default_settings
from draco_ray.sandbox.world.build import read_manifest
from draco_ray.sandbox.world.scripts import Family, families
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.terminal import PlainConsole

RECIPE = "starter.json"
"""File written last: a folder with it is complete, and its content tells whether the folder is up to date."""
PRESETS = {"standard": "sandbox", "hard": "sandbox-hard"}
"""Variety of the world -> preset of its starter policy; the demonstrations use the agent of this preset."""
PACKAGE = Path(__file__).resolve().parents[2]
Edit = Callable[[list[demo.Demonstration]], list[demo.Demonstration]]
SOURCES = (
    "sandbox/starter",
    "sandbox/world/scripts.py",
    "sandbox/world/families.toml",
    "rollout/agent.py",
    "rollout/code_block.py",
    "engine/chat.py",
)
"""Files and folders of the package that determine the weights."""


def build_starter(
    out: Path,
    world: Path,
    *,
    seed: int = 0,
    settings: StarterSettings | None = None,
    variety: str | None = None,
    edit: Edit | None = None,
    progress: bool = False,
) -> Path:
    """Make the starter policy in ``out``, a Hugging Face model directory; returns at once if the same one is there.

    Args:
        out: folder to write. An older starter policy in its place is replaced, anything else is refused.
        world: a sandbox made by ``draco sandbox build``; only one split's tasks are demonstrated.
        seed: random seed of the faults, the initial weights and the order of training. Equal seeds, worlds and
            settings give equal weights on the same kind of machine.
        settings: the recipe; None: the default recipe for the world's variety.
        variety: required variety of the world; None accepts any.
        edit: changes the demonstrations before they are executed.
        progress: print what is being done.
    Returns: ``out``.
    Raises: WorldError if ``world`` is no such sandbox or AppWorld fails; ConfigError if ``out`` holds something else;
        ModuleNotFoundError without PyTorch and transformers.
    """
    for package in ("torch", "transformers"):
        require_package(package)
    console = PlainConsole(quiet=not progress)
    out = out.absolute()
    manifest = _sandbox(world, variety)
    settings = settings or default_settings(manifest["variety"])
    agent = load_config(PRESETS[manifest["variety"]]).agent
    recipe = _recipe(manifest, agent, settings, seed, edit)
    if (out / RECIPE).is_file():
        if (out / RECIPE).read_text(encoding="utf-8") == recipe:
            console.print(f"starter: {out} is up to date")
            return out
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} has no {RECIPE}, so it is not a starter policy; choose another folder")

    out.parent.mkdir(parents=True, exist_ok=True)
    with PrivateTempDir(out.parent) as folder:
        made, old = folder / "new", folder / "old"
        made.mkdir()
        started = time.monotonic()

        def say(what: str) -> None:
            console.print(f"starter: {what} [{time.monotonic() - started:.0f} s]")

        _build(made, world, manifest, agent, settings, seed, edit, say)
        (made / RECIPE).write_text(recipe, encoding="utf-8")
        if out.exists():
            out.rename(old)
        made.rename(out)
    return out


def _sandbox(world: Path, variety: str | None) -> dict[str, Any]:
    """The manifest of a sandbox; ``variety``: the required one, None for any. Raises: WorldError."""
    manifest = read_manifest(world)
    build = f"run `draco sandbox build --out {world}{f' --variety {variety}' if variety else ''}` first"
    if manifest is None:
        raise WorldError(f"no sandbox world at {world}; {build}")
    found = manifest["variety"]
    if variety not in (None, found):
        raise WorldError(f"the sandbox world at {world} has variety {found}, expected {variety}; {build}")
    check_data_root(world)
    return manifest


def _recipe(
    manifest: dict[str, Any], agent: AgentConfig, settings: StarterSettings, seed: int, edit: Edit | None = None
) -> str:
    """Everything that determines the weights, as text to store and compare."""
    recipe = {
        "seed": seed,
        "settings": settings.model_dump(mode="json", exclude={"processes"}),
        "agent": agent.model_dump(mode="json"),
        "world": manifest["digest"],
        "source": _source_digest(agent),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    if edit is not None:
        recipe["edit"] = hashlib.sha256(Path(inspect.getfile(edit)).read_bytes()).hexdigest()[:16]
    return json.dumps(recipe, indent=1) + "\n"


def _source_digest(agent: AgentConfig) -> str:
    named = [PACKAGE / name for name in SOURCES]
    files = [file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    files.append(find_prompt(agent.prompt or AppWorldEnvironment.agent_prompt))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _build(
    out: Path,
    world: Path,
    manifest: dict[str, Any],
    agent: AgentConfig,
    settings: StarterSettings,
    seed: int,
    edit: Edit | None,
    say: Callable[[str], None],
) -> None:
    """Write a complete model directory."""
    # Imported late: they take seconds, and an up-to-date model needs none of them.
    from transformers.utils import logging

    from draco_ray.engine.chat import ChatTokenizer
    from draco_ray.sandbox.starter.tokenizer import train_tokenizer

    set_threads(settings.threads)
    from draco_ray.sandbox.starter.train import new_model, train

    tasks = _tasks(world, manifest, settings.split)
    drawn = demo.draw_demonstrations(tasks, settings.variants, settings.fault_rates, seed)
    drawn = drawn if edit is None else edit(drawn)
    say(f"executing {len(drawn)} demonstrations of {len(tasks)} tasks in AppWorld")
    played = demo.execute(drawn, world, settings.processes)

    words = random.Random(f"words/{seed}")
    rounds = [[demo.reword(each, words) for each in played] for _ in range(settings.epochs)]
    corpus = (text for played in rounds for each in played for text in demo.texts(each, agent, settings.closing))
    tokenizer = train_tokenizer(corpus, settings.vocabulary, settings.positions)
    chat = ChatTokenizer(tokenizer, thinking=agent.thinking)
    epochs = [
        [demo.tokenize_demonstration(each, chat, agent, settings.closing) for each in played] for played in rounds
    ]
    tokens = sum(len(example.token_ids) for example in epochs[0])
    say(f"tokenizer of {len(tokenizer)} entries, {tokens / len(played):.0f} tokens per demonstration")

    model = new_model(tokenizer, settings, seed)
    loss = train(model, epochs, settings, seed)
    say(f"{model.num_parameters() / 1e6:.2f}M parameters trained, {loss:.3f} nats per sampled token")
    logging.disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _tasks(world: Path, manifest: dict[str, Any], split: str) -> list[tuple[Task, Family]]:
    """The split's tasks, each with its family."""
    known = families()
    return [
        (load_task(world, task_id), known[manifest["tasks"][task_id]["family"]]) for task_id in load_split(world, split)
    ]
