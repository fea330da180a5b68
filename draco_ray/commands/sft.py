"""``draco sft``: fine-tunes on demonstrations, which gives a model to start training from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draco_ray.config.machine import cores, set_threads
from draco_ray.config.schema import DracoConfig
from draco_ray.environments.base import make_environment
from draco_ray.errors import ConfigError
from draco_ray.extras import require_package
from draco_ray.judging.outage import format_duration
from draco_ray.runs.directory import RunDirectory
from draco_ray.temp_dirs import PrivateTempDir
from draco_ray.terminal import console

SECTIONS_READ = ("seed", "data", "model", "agent", "environment", "learner")
"""Sections of the configuration that fine-tuning uses."""
PROGRESS_SECONDS = 30.0
"""Time between two lines of progress."""
OF_ROLLOUTS = ("kl_coefficient", "entropy_coefficient", "importance_cap", "mask_low", "mask_high")
"""Keys of ``learner`` that only affect training with rewards."""


def ineffective_sft_keys(config: DracoConfig, *, new: bool) -> dict[str, str]:
    """Keys in `SECTIONS_READ` that have no effect; see `draco_ray.config.ineffective_keys.check_effective`."""
    if new:
        return dict.fromkeys(("model", "learner"), "with --new")
    idle = {f"learner.{key}": "in supervised fine-tuning" for key in OF_ROLLOUTS}
    if config.learner.sft_learning_rate is not None:
        idle["learner.learning_rate"] = "because learner.sft_learning_rate is set; change that key"
    return idle


def fine_tune(config: DracoConfig, source: Path, out: Path, *, epochs: int, best: int, new: bool) -> None:
    """Train a model and write it to ``out``, completely or not at all.

    Args:
        config: configuration of the later training; demonstrations without a prompt get its agent's prompt.
        source: a JSONL file of messages, or a run directory.
        out: the model directory to write; a new or empty folder.
        epochs: passes over the demonstrations.
        best: number of best rollouts to take per task, if ``source`` is a run.
        new: train a small model from scratch instead of ``model.path``.
    Raises: ConfigError.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "")
    set_threads(int(threads) if threads.isdigit() else cores())
    for package in ("torch", "transformers"):
        require_package(package)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: already exists; choose another --out")
    if new and source.is_dir():
        raise ConfigError(
            f"--new: {source} is a run with another model's tokens; expected demonstrations as JSONL of messages"
        )
    began = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with PrivateTempDir(out.parent) as folder:
        made = folder / "model"
        train = _new_model if new else _adapted
        count, loss = train(config, source, made, epochs, best)
        if out.exists():
            out.rmdir()
        made.rename(out)
    console.print(
        f"{out}: {count} demonstrations, {epochs} epochs, {loss:.3f} nats per token in the last epoch "
        f"[{time.monotonic() - began:.0f} s]",
    )


def _adapted(config: DracoConfig, source: Path, out: Path, epochs: int, best: int) -> tuple[int, float]:
    from draco_ray.engine.chat import ChatTokenizer
    from draco_ray.engine.model_directory import load_tokenizer
    from draco_ray.training.demonstrations import best_rollouts
    from draco_ray.training.demonstrations import fine_tune as train
    from draco_ray.training.preflight import check_trainable
    from draco_ray.training.session import checked_model

    config = checked_model(config)
    check_trainable(config.model.path, config.learner.model_copy(update={"context_parallel": 1}))
    if source.is_dir():
        run = RunDirectory.open(source)
        if run.setting("model.path") != config.model.path:
            raise ConfigError(
                f"{source}: its rollouts have tokens of another model; set model.path={run.setting('model.path')}"
            )
        chosen = best_rollouts(run, best)
        samples: Sequence[Any] = chosen.samples
        console.print(f"selected {chosen.rollouts} of {chosen.seen} rollouts, from {chosen.tasks} tasks")
    else:
        chat = ChatTokenizer(
            load_tokenizer(config.model.path, config.model.chat_template), thinking=config.agent.thinking
        )
        samples = _samples(config, source, chat)
    samples = _fitting(config, samples)
    loss = train(config, samples, out, epochs=epochs, on_update=_progress())
    return len(samples), loss


def _new_model(config: DracoConfig, source: Path, out: Path, epochs: int, best: int) -> tuple[int, float]:
    """Train a stand-in for a pretrained model in the same way as the sandbox's starter policy."""
    from transformers.utils import logging

    from draco_ray.engine.chat import ChatTokenizer
    from draco_ray.sandbox.starter.demonstrations import Example
    from draco_ray.sandbox.starter.settings import StarterSettings
    from draco_ray.sandbox.starter.tokenizer import train_tokenizer
    from draco_ray.sandbox.starter.train import new_model, train

    agent = config.agent
    settings = StarterSettings(epochs=epochs, positions=agent.max_prompt_length + agent.max_response_length)
    # Any tokenizer can render the demonstrations as text.
    speller = ChatTokenizer(train_tokenizer([], 300, settings.positions), thinking=agent.thinking)
    samples = _samples(config, source, speller)
    texts = (speller.tokenizer.decode(sample.token_ids_T.tolist(), skip_special_tokens=True) for sample in samples)
    tokenizer = train_tokenizer(texts, settings.vocabulary, settings.positions)
    samples = _fitting(config, _samples(config, source, ChatTokenizer(tokenizer, thinking=agent.thinking)))
    examples = [
        Example(token_ids=tuple(each.token_ids_T.tolist()), sampled=tuple(each.loss_mask_T.tolist()))
        for each in samples
    ]
    model = new_model(tokenizer, settings, config.seed)
    loss = train(model, [examples] * epochs, settings, config.seed, _progress())
    logging.disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return len(samples), loss


def _samples(config: DracoConfig, source: Path, chat: Any) -> list[Any]:
    from draco_ray.engine.actor import EngineClient
    from draco_ray.rollout.agent import agent_template, find_agent
    from draco_ray.rollout.tokens import TokenPolicy
    from draco_ray.training.demonstrations import as_sample, read_demonstrations

    environment = make_environment(config.environment, config.data)
    template = agent_template(config.agent.prompt, environment.agent_prompt)
    policy = TokenPolicy(EngineClient(0, ""), chat, config.agent)
    agent = find_agent(config.agent.use)(policy, config.agent, template)
    return [as_sample(each, chat) for each in read_demonstrations(source, environment, agent)]


def _fitting(config: DracoConfig, samples: Sequence[Any]) -> list[Any]:
    """Drop samples that are longer than a rollout can be, and print their number."""
    from draco_ray.training.demonstrations import filter_by_length

    kept, said = filter_by_length(samples, config.agent)
    if said is not None:
        console.print(said)
    return kept


def _progress() -> Callable[[int, int, float], None]:
    """Print a line with the remaining time for the first and last update, and every `PROGRESS_SECONDS` between."""
    began = time.monotonic()
    printed = began

    def tell(done: int, total: int, loss: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if done in (1, total) or now - printed >= PROGRESS_SECONDS:
            printed = now
            left = format_duration((total - done) * (now - began) / done)
            console.print(f"sft: update {done}/{total}, {loss:.3f} nats per token, about {left} left")

    return tell
