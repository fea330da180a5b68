"""Rollouts of agents' programs in workspaces, with a scripted policy behind the real endpoint."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig
from draco_ray.environments.base import GuardedWorld, WorldVerdict
from draco_ray.environments.workspace import WorkspaceEnvironment
from draco_ray.records import Trajectory
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.program_agent import ProgramAgent
from draco_ray.rollout.tokens import TokenPolicy
from tests.support.endpoint_episode import CHAT, ScriptedSampler, check_recorded_tokens


def repository(folder: Path) -> Path:
    """A git repository whose last commit, after the tag ``task``, has the solution."""
    folder.mkdir()

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    (folder / "add.py").write_text("def add(a, b):\n    return a - b\n")
    git("add", ".")
    git("commit", "-q", "-m", "Add")
    git("tag", "task")
    (folder / "add.py").write_text("def add(a, b):\n    return a + b\n")
    git("commit", "-qam", "The solution")
    return folder


def leftover_processes(mark: str) -> list[psutil.Process]:
    """Running processes with this word in their command line."""
    running = psutil.process_iter(["cmdline", "status"])
    return [each for each in running if mark in (each.info["cmdline"] or ()) and each.info["status"] != "zombie"]


def new_mark() -> str:
    return str(1_000_000 + time.time_ns() % 1_000_000)


class Workspaces:
    """Plays rollouts in copies of a repository."""

    def __init__(self, folder: Path, *, isolation: str = "namespaces", memory_mib: int = 4096, **options: Any) -> None:
        self.folder = folder
        if not (folder / "repo").exists():
            repository(folder / "repo")
            row = '{"id": "1", "instruction": "Fix add.", "expected": {"files": "hidden"}}\n'
            (folder / "tasks.jsonl").write_text(row)
            (folder / "hidden").mkdir()
            (folder / "hidden" / "test_add.py").write_text("from add import add\n\nassert add(1, 2) == 3\n")
        options = {"repository": "repo", "reference": "task", "test": "python3 test_add.py", **options}
        self.config = EnvironmentConfig.model_validate(
            {"use": "workspace", "isolation": isolation, "max_memory_mib": memory_mib, "options": options}
        )
        self.data = DataConfig(root=folder)
        self.verdict: WorldVerdict | None = None
        self.kept: dict[str, str] = {}

    def environment(self, *, ground_truth: bool = True) -> WorkspaceEnvironment:
        return WorkspaceEnvironment(self.config, self.data, ground_truth=ground_truth, name="test")

    async def play(self, sampler: ScriptedSampler, *, rollout: int = 0, task: str = "1", **agent: Any) -> Trajectory:
        """Play one rollout, and set `verdict` and `kept` to its verdict and files."""
        config = AgentConfig.model_validate(
            {
                "use": "command",
                "thinking": False,
                "timeout_seconds": 1200,
                "folder": self.folder,
                "max_prompt_length": 60_000,
                "max_response_length": 60_000,
                **agent,
            }
        )
        player = ProgramAgent(TokenPolicy(sampler, CHAT, config), config, "{task_description}")
        environment = self.environment()
        environment.container = config.container
        world = GuardedWorld(await environment.open(task), "test", 600.0)
        try:
            request = RolloutRequest(task_id=task, group="g", rollout=rollout, attempt=0, seed=1)
            played = await player.run(world, request)
            check_recorded_tokens(played, sampler)
            self.verdict = await world.evaluate()
            kept = self.folder / f"kept{rollout}"
            await world.keep(kept)
            self.kept = {path.name: path.read_text() for path in kept.glob("*")}
        finally:
            await world.close()
        return played
