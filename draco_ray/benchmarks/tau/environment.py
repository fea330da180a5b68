"""τ-bench as a training ground: an episode is tau2's own, played by its orchestrator, agent and user simulator.

The policy is behind the endpoint of an agent's program (``agent.use: command``, `draco_ray.benchmarks.tau.play`). What
tau2 writes of an episode is kept with the run. Its reward is a number of the evaluator's, and where the environment was
opened without ground truth there is none: tau2's process is then not told what a task is evaluated by.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draco_ray.benchmarks.tau.domain import Domain, domain_folder, read_domain
from draco_ray.benchmarks.tau.episodes import ENDED_WELL, TOLERANCE
from draco_ray.benchmarks.tau.installation import RUNNER, check_package, find_home, find_python
from draco_ray.benchmarks.tau.job import JUDGE_KEY, PASSED_ON, litellm_variables, sampling
from draco_ray.config.schema import DataConfig, EnvironmentConfig, TauModelConfig, Tree
from draco_ray.engine.child import Scrubber
from draco_ray.environments.base import Environment, WorldVerdict
from draco_ray.environments.program import MARK
from draco_ray.environments.tasks import KEPT, WORKSPACE
from draco_ray.environments.tools.environment import described
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.records import Task
from draco_ray.temp_dirs import PrivateTempDir

JOB = "tau2"
"""Field of an open task: what `draco_ray.benchmarks.tau.play` has to play, without a key."""
_RESULTS = "results.json"
_HOW_AGENTS_ACT = """\
- The agent serves one customer in the support chat of a company: domain {domain} of τ-bench. The task's text is what \
the customer is told, and no instruction to the agent, who learns of it only what the customer says under USER: it is \
to be judged by what it could know, and by its policy.
- A step is a turn of the agent: it either calls tools, whose results stand as its output, or speaks to the customer. \
How calls are spelled is the model's own form, and no criterion may punish it.
- The customer is simulated by a model and ends the chat with ###STOP###, ###TRANSFER### or ###OUT-OF-SCOPE###; nobody \
may hold that, or the customer's mistakes, against the agent.
- What stands under PROGRAM at the end says only how the chat ended."""


class _User(TauModelConfig):
    """The user simulator."""

    api_key_env: str = "TAU2_USER_API_KEY"


class _Judge(TauModelConfig):
    """The judge of tau2's natural-language assertions."""

    api_key_env: str = "TAU2_USER_API_KEY"


class TauOptions(Tree):
    """``environment.options`` of ``environment.use: tau``."""

    domain: Literal["retail", "airline", "telecom"]
    """tau2's domain; banking is for measuring (docs/tau_bench.md)."""
    tau2_python: str | None = None
    """Python that can import tau2; null: TAU2_PYTHON, else .venv/bin/python of tau2_home."""
    tau2_home: Path | None = None
    """Checkout of tau2-bench, for its data; null: TAU2_HOME."""
    tau2_version: str = "1.0.1"
    """Tasks and grading changed between versions: another one is refused."""
    user: _User = _User()
    """The user simulator. Its key's variable has to be named in ``agent.pass_environment``, too."""
    judge: _Judge = _Judge()
    """What decides natural-language assertions where an episode is evaluated."""
    max_steps: int = Field(200, ge=1)
    """tau2's own limit: turns of both sides and of tools."""
    seed: int = Field(300, ge=0, lt=2**32)
    """Of tau2's episodes: what the user simulator's model is asked with."""


class TauEnvironment(Environment):
    """``environment.use: tau``."""

    evaluates = True

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        try:
            self.options = TauOptions.model_validate(config.options)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"environment.options: {'; '.join(problems)}") from None
        for role, model in (("user", self.options.user), ("judge", self.options.judge)):
            if model.api_key_env in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
                raise ConfigError(
                    f"environment.options.{role}.api_key_env={model.api_key_env}: that is the episode's own in an "
                    "agent's program; expected another name, such as TAU2_USER_API_KEY"
                )

    @property
    def facts(self) -> str:  # type: ignore[override]
        """What the judge is told: how episodes go, the agent's policy, and the tools. Raises: ConfigError."""
        told = self._told
        policy = textwrap.indent(told["policy"].strip(), "  ")
        lines = [_HOW_AGENTS_ACT.format(domain=self.options.domain), f"- The agent's policy, word for word:\n{policy}"]
        lines += [described(tool) for tool in told["tools"]]
        if told["user_tools"]:
            names = ", ".join(tool["function"]["name"] for tool in told["user_tools"])
            lines.append(f"- The customer has tools of their own, which the agent can only ask them to use: {names}")
        return "\n".join(lines)

    @property
    def agent_variables(self) -> list[str]:  # type: ignore[override]
        """See `Environment`: the user simulator's key, and the judge's where there is one."""
        user, judge = self.options.user.api_key_env, self.options.judge.api_key_env
        return list(dict.fromkeys([user, *([judge] if os.environ.get(judge) else [])]))

    def tasks(self, split: str) -> list[str]:
        """See `Environment`. Raises: ConfigError too, one line for what is missing of tau2 or its keys."""
        found = self._domain.splits.get(split)
        if not found:
            named = ", ".join(self._domain.splits)
            raise WorldError(f"domain {self.options.domain}: no task of split {split!r}; there are {named}")
        variable = self.options.user.api_key_env
        if not os.environ.get(variable):
            raise ConfigError(
                f"user simulator: no key in the environment variable {variable}; export it (any text where the "
                "endpoint asks for none), or name another in environment.options.user.api_key_env and in "
                "agent.pass_environment"
            )
        self.job(found[0], Path())
        _ = self._told
        return list(found)

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        task = self._domain.tasks.get(task_id)
        if task is None:
            raise WorldError(f"domain {self.options.domain}: no task {task_id!r}")
        return Task(task_id=task_id, instruction=task.scenario)

    async def open(self, task_id: str) -> TauWorld:
        """See `Environment`."""
        return TauWorld(self, self.task(task_id))

    def job(self, task_id: str, folder: Path) -> dict[str, Any]:
        """One episode as `draco_ray.benchmarks.tau.play` takes it; what it writes is in ``folder``.

        Raises: ConfigError where the user simulator cannot be told to tau2.
        """
        options, domain = self.options, self.options.domain
        key, variables = litellm_variables("environment.options.user", options.user, options.user.model)
        # LiteLLM takes one endpoint for all models of a provider, and the policy has its own.
        agent = "openai" if options.user.model.startswith("hosted_vllm/") else "hosted_vllm"
        if options.user.model.startswith(f"{agent}/"):
            raise ConfigError(f"environment.options.user.model: {options.user.model}: expected another provider")
        return {
            "python": find_python(options, self._home),
            "runner": str(RUNNER),
            "domain": domain,
            "task": self._domain.tasks[task_id].tau2_id,
            "evaluate": self.ground_truth,
            "seed": options.seed,
            "max_steps": options.max_steps,
            # What the endpoint refuses it would refuse again.
            "agent": {"model": f"{agent}/policy", "provider": agent.upper(), "args": {"num_retries": 0}},
            "user": {"model": options.user.model, "args": sampling(options.user)},
            "judge": {
                "model": options.judge.model,
                "api_base": options.judge.api_base,
                "args": sampling(options.judge),
                "key": JUDGE_KEY,
            },
            "keys": {key: options.user.api_key_env, JUDGE_KEY: options.judge.api_key_env},
            "passed": [*PASSED_ON, "NO_PROXY", "no_proxy", "TMPDIR", MARK],
            "variables": {name: value for name, value in variables.items() if value}
            | {
                "TAU2_DATA_DIR": str(self._home / "data"),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "PYTHON_DOTENV_DISABLED": "1",
                "LOGURU_LEVEL": "WARNING",
                "PYTHONUNBUFFERED": "1",
            },
            "results": str(folder / _RESULTS),
            "judge_calls": str(folder / "judge_calls.jsonl"),
            "log": str(folder / "tau2.log"),
        }

    @functools.cached_property
    def _home(self) -> Path:
        return find_home(self.options, domain_folder(self.options.domain))

    @functools.cached_property
    def _domain(self) -> Domain:
        return read_domain(self._home, self.options.domain)

    @property
    def _told(self) -> Mapping[str, Any]:
        """Policy and tools, as tau2 tells its agent."""
        _ = self._domain
        return _asked(self.options.model_dump_json(), find_python(self.options, self._home), self._home)


@functools.cache
def _asked(options: str, python: str, home: Path) -> Mapping[str, Any]:
    read = TauOptions.model_validate_json(options)
    told: dict[str, Any] = check_package(read, python, home, read.domain)["domain"]
    if "error" in told:
        raise ConfigError(f"tau2_python {python}: domain {read.domain} cannot be made: {told['error']}")
    return told


class TauWorld:
    """One open task: a folder in which tau2 writes."""

    def __init__(self, environment: TauEnvironment, task: Task) -> None:
        self._environment = environment
        self._folder = PrivateTempDir()
        self._kept = self._folder.path / KEPT
        self._kept.mkdir()
        job = json.dumps(environment.job(task.task_id, self._kept))
        self.task = replace(task, fields={WORKSPACE: str(self._folder.path), JOB: job})

    async def act(self, action: str) -> str:
        """Take what the agent's program printed; tau2's result file says more. Raises: EnvironmentCrashed."""
        self._simulation()
        return ""

    async def evaluate(self) -> WorldVerdict:
        """The reward that tau2 gave. Raises: see `World`."""
        if not self._environment.ground_truth:
            raise WorldError(f"task {self.task.task_id}: the environment was opened without ground truth")
        simulation = self._simulation()
        ended, info = simulation["termination_reason"], simulation.get("info") or {}
        if ended not in ENDED_WELL:
            return WorldVerdict(success=False, reward=0.0, failures=(ended,))
        reward = simulation.get("reward_info")
        if reward is None:
            raise EnvironmentCrashed(
                f"task {self.task.task_id}: tau2 could not evaluate it: {info.get('evaluation_error')}"
            )
        parts = reward.get("reward_breakdown") or {}
        failures = tuple(sorted(part for part, value in parts.items() if value < 1 - TOLERANCE))
        return WorldVerdict(
            success=abs(reward["reward"] - 1) <= TOLERANCE,
            reward=reward["reward"],
            passed_tests=len(parts) - len(failures),
            total_tests=len(parts),
            failures=failures,
        )

    async def keep(self, folder: Path) -> None:
        """Keep tau2's result file and its log. Keys are taken out: a provider's error may have quoted one."""
        options = self._environment.options
        scrubber = Scrubber(os.environ.get(each.api_key_env, "") for each in (options.user, options.judge))
        for file in self._kept.iterdir():
            scrubber.file(file)
        await asyncio.to_thread(shutil.copytree, self._kept, folder)

    async def close(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(self._folder.remove)

    def _simulation(self) -> Mapping[str, Any]:
        try:
            (simulation,) = json.loads((self._kept / _RESULTS).read_text(encoding="utf-8"))["simulations"]
            read: Mapping[str, Any] = {**simulation, "termination_reason": str(simulation["termination_reason"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentCrashed(f"task {self.task.task_id}: tau2 left no result file ({error!r})") from None
        return read
