"""Stand-in for tau2.runner.batch: episodes as ``data/script.json`` says, in tau2's files.

Script: ``rewards`` (task -> reward per trial, default 1), ``errors`` (tasks that end in an infrastructure error),
``crash`` and ``hang`` (for each start of the process, the number of new episodes before it), ``quote`` (print this
variable's value).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tau2.data_model.simulation import TextRunConfig
from tau2.evaluator import evaluator_nl_assertions
from tau2.knowledge import embeddings_cache
from tau2.knowledge.embedders.openrouter_embedder import OpenRouterEmbedder
from tau2.knowledge.sandbox_manager import SandboxManager


def run_tasks(
    config: TextRunConfig, tasks: list[str], *, save_path: Path, results_format: str, console_display: bool
) -> None:
    """Write a file for each missing episode; episodes with infrastructure errors are run again."""
    assert results_format == "dir"
    assert console_display is False
    data = Path(os.environ["TAU2_DATA_DIR"])
    script = json.loads((data / "script.json").read_text()) if (data / "script.json").exists() else {}
    starts = len(list(data.glob("start_*")))
    (data / f"start_{starts}").touch()
    folder = save_path.parent / "simulations"
    folder.mkdir(exist_ok=True)
    save_path.write_text(json.dumps({"info": {"num_trials": config.values["num_trials"]}, "tasks": []}))
    (save_path.parent / "probe.json").write_text(json.dumps(_probe(config)))
    if "quote" in script:
        print(f"refused: incorrect key {os.environ[script['quote']]}", file=sys.stderr, flush=True)
    done = set()
    for file in folder.glob("*.json"):
        simulation = json.loads(file.read_text())
        if simulation["termination_reason"] == "infrastructure_error":
            file.unlink()
        else:
            done.add((simulation["task_id"], simulation["trial"]))
    new = 0
    for trial in range(config.values["num_trials"]):
        for task in tasks:
            if (task, trial) in done:
                continue
            if _now(script, "crash", starts) == new:
                os._exit(9)
            if _now(script, "hang", starts) == new:
                time.sleep(600)
            _write(folder, _simulation(script, task, trial))
            new += 1


def _now(script: dict[str, Any], what: str, start: int) -> int | None:
    planned = script.get(what, [])
    return planned[start] if start < len(planned) else None


def _write(folder: Path, simulation: dict[str, Any]) -> None:
    partial = folder / f".sim_{simulation['id']}.json"
    partial.write_text(json.dumps(simulation))
    partial.replace(folder / f"{simulation['id']}.json")


def _simulation(script: dict[str, Any], task: str, trial: int) -> dict[str, Any]:
    stamp = f"2026-01-01T00:00:{trial:02d}"
    common = {"id": str(uuid.uuid4()), "task_id": task, "trial": trial, "timestamp": stamp, "seed": trial}
    if task in script.get("errors", []):
        error = {"error": "bad agent", "error_type": "RuntimeError", "failed_after_attempts": 4}
        reason = {"termination_reason": "infrastructure_error", "reward_info": None, "messages": [], "info": error}
        return {**common, **reason, "duration": 0.0}
    reward = script.get("rewards", {}).get(task, [1.0] * 9)[trial]
    usage = {"prompt_tokens": 1000, "completion_tokens": 50}
    messages = [
        {"role": "assistant", "content": "Hi!", "usage": None, "cost": 0.0},
        {"role": "user", "content": "Hello.", "usage": usage},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "log"}], "usage": usage},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "Done.", "usage": usage},
        {"role": "user", "content": "###STOP###", "usage": usage},
    ]
    info = {"reward": reward, "reward_basis": ["DB"], "reward_breakdown": {"DB": reward}}
    return {
        **common,
        "termination_reason": "user_stop",
        "reward_info": info,
        "messages": messages,
        "duration": 1.5,
        "info": None,
    }


def _probe(config: TextRunConfig) -> dict[str, Any]:
    """The state of the patched parts, for the test to check."""
    reply = evaluator_nl_assertions.judge()
    embedder = OpenRouterEmbedder()
    shell = SandboxManager()
    return {
        "config": config.values,
        "judge": {"model": reply.model, "api_base": reply.arguments.get("api_base"), "keyed": bool(_key(reply))},
        "embedder": {"model": embedder.model, "base_url": embedder.client.arguments["base_url"]},
        "cache": str(embeddings_cache._global_cache.cache_dir),
        "shell": shell.run_command("env").split("\n"),
        "denied": json.loads(shell.settings_path.read_text())["filesystem"]["denyRead"],
        "tmp": tempfile.gettempdir(),
        "folder": os.getcwd(),
        "arguments": sys.argv,
        "variables": sorted(os.environ),
    }


def _key(reply: Any) -> str | None:
    return reply.arguments.get("api_key")
