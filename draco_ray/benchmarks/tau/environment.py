"""τ-bench as a training environment: tau2's own orchestrator, agent and user simulator play each episode.

The policy answers through the endpoint of an agent program (``agent.use: command``, `draco_ray.benchmarks.tau.play`).
tau2's result file is stored with the run. The reward is tau2's. An environment opened without ground truth gives no
reward, and tau2's process then does not see a task's evaluation criteria.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from draco_ray.benchmarks.tau.config import Tau2Config, TauModelConfig
from draco_ray.benchmarks.tau.results import ENDED_WELL, Episode, read_records
from draco_ray.benchmarks.tau.tau2_process import (
    DOMAINS_FOLDER,
    JUDGE_KEY,
    PASSED_ON,
    RUNNER_SCRIPT,
    check_package,
    find_home,
    find_python,
    judge_job,
    litellm_variables,
    sampling_arguments,
    tau2_base_env_vars,
)
from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.engine.child import Scrubber
from draco_ray.environments.base import Environment, WorldVerdict, checked_options
from draco_ray.environments.program import EPISODE_VARIABLE
from draco_ray.environments.tasks import KEPT_FOLDER, WORKSPACE_FIELD
from draco_ray.environments.tools.environment import described
from draco_ray.errors import ConfigError, EnvironmentCrashed, TauBenchError, WorldError
from draco_ray.records import Task
from draco_ray.temp_dirs import PrivateTempDir

JOB_FIELD = "tau2"
"""Field of an open task that holds the job for `draco_ray.benchmarks.tau.play`, without API keys."""
MAX_ID_LENGTH = 100
_HOW_AGENTS_ACT = """\
- The agent serves one customer in the support chat of a company: domain {domain} of τ-bench. The task's text is what \
the customer is told, and no instruction to the agent, who learns of it only what the customer says under USER: it is \
to be judged by what it could know, and by its policy.
- A step is a turn of the agent: it either calls tools, whose results stand as its output, or speaks to the customer. \
How calls are spelled is the model's own form, and no criterion may punish it.
- The customer is simulated by a model and ends the chat with ###STOP###, ###TRANSFER### or ###OUT-OF-SCOPE###; nobody \
may hold that, or the customer's mistakes, against the agent.
- What stands under PROGRAM at the end says only how the chat ended."""


class _Model(TauModelConfig):
    api_key_env: str = "TAU2_USER_API_KEY"


class TauOptions(Tau2Config):
    """``environment.options`` of ``environment.use: tau``."""

    domain: Literal["retail", "airline", "telecom"]
    """tau2's domain; banking is only evaluated (docs/tau_bench.md)."""
    user: _Model = _Model()
    """The user simulator. ``agent.pass_environment`` must also name the environment variable of its key."""
    judge: _Model = _Model()
    """The judge of tau2's natural-language assertions, called only if episodes are evaluated."""
    max_steps: int = Field(200, ge=1)
    """tau2's own limit on an episode; it counts the turns of agent, user simulator and tools."""
    seed: int = Field(300, ge=0, lt=2**32)
    """Seed of tau2's episodes, sent to the user simulator's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A domain's tasks as their customers know them, without evaluation criteria."""

    tasks: Mapping[str, Task]
    """Id -> task; ids are valid file names."""
    tau2_ids: Mapping[str, str]
    splits: Mapping[str, tuple[str, ...]]
    """Task ids of each split, in tau2's order."""


@functools.cache
def read_domain(home: Path, domain: str) -> Domain:
    """Read a domain's tasks and splits from the checkout ``home``.

    Raises: ConfigError: a file is missing or unreadable, or a split lists an unknown task.
    """
    folder = home / DOMAINS_FOLDER / domain
    try:
        rows = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
        tau2_ids = {short_id(row["id"]): row["id"] for row in rows}
        scenarios = {short_id(row["id"]): _scenario(row["user_scenario"]) for row in rows}
        listed = json.loads((folder / "split_tasks.json").read_text(encoding="utf-8"))
        splits = {name: tuple(map(short_id, ids)) for name, ids in listed.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder}: not the task files of tau2-bench 1.0.1 ({type(error).__name__}: {error})"
        ) from None
    tasks = {task_id: Task(task_id=task_id, instruction=scenario) for task_id, scenario in scenarios.items()}
    for name, ids in splits.items():
        if absent := [task_id for task_id in ids if task_id not in tasks]:
            raise ConfigError(f"{folder}: split {name!r} lists {len(absent)} tasks missing in tasks.json: {absent[0]}")
    return Domain(tasks=tasks, tau2_ids=tau2_ids, splits=splits)


def short_id(tau2_id: str) -> str:
    """Make a file name from a task id: short ids stay; telecom's long ones are truncated and get a digest.

    >>> short_id("17")
    '17'
    >>> short_id("[mms_issue]bad_wifi_calling|data_mode_off[PERSONA:Hard]")
    'mms_issue_bad_wifi_calling_data_mode_off_PERSONA_Hard-fc70ec53'
    """
    if re.fullmatch(r"\w[\w.-]*", tau2_id, re.ASCII) and len(tau2_id) <= MAX_ID_LENGTH:
        return tau2_id
    words = re.sub(r"\W+", "_", tau2_id, flags=re.ASCII).strip("_")
    return f"{words[:MAX_ID_LENGTH]}-{hashlib.sha256(tau2_id.encode()).hexdigest()[:8]}"


def _scenario(scenario: Mapping[str, Any]) -> str:
    told = scenario["instructions"]
    lines = [f"Persona: {scenario['persona']}"] if scenario.get("persona") else []
    if isinstance(told, str):
        return "\n".join([*lines, told])
    titles = {
        "reason_for_call": "Reason for the call",
        "known_info": "Knows",
        "unknown_info": "Does not know",
        "task_instructions": "Is to behave so",
    }
    return "\n".join([*lines, *(f"{title}: {told[name].strip()}" for name, title in titles.items() if told.get(name))])


class TauEnvironment(Environment):
    """``environment.use: tau``."""

    evaluates = True

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        self.options = checked_options(TauOptions, config.options)
        for role, model in (("user", self.options.user), ("judge", self.options.judge)):
            if model.api_key_env in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
                raise ConfigError(
                    f"environment.options.{role}.api_key_env={model.api_key_env}: the agent program's endpoint uses "
                    "that variable; expected another name, such as TAU2_USER_API_KEY"
                )

    @property
    def facts(self) -> str:  # type: ignore[override]
        """Facts for the judge: the course of an episode, the agent's policy, and the tools. Raises: ConfigError."""
        found = self._description
        policy = textwrap.indent(found["policy"].strip(), "  ")
        lines = [_HOW_AGENTS_ACT.format(domain=self.options.domain), f"- The agent's policy, word for word:\n{policy}"]
        lines += [described(tool) for tool in found["tools"]]
        if found["user_tools"]:
            names = ", ".join(tool["function"]["name"] for tool in found["user_tools"])
            lines.append(f"- The customer has tools of their own, which the agent can only ask them to use: {names}")
        return "\n".join(lines)

    @property
    def agent_variables(self) -> list[str]:  # type: ignore[override]
        """See `Environment`: the key variable of the user simulator, and the judge's if it is set."""
        user, judge = self.options.user.api_key_env, self.options.judge.api_key_env
        return list(dict.fromkeys([user, *([judge] if os.environ.get(judge) else [])]))

    def tasks(self, split: str) -> list[str]:
        """See `Environment`. Raises: also ConfigError: tau2 cannot be used, or a key is missing."""
        found = self._domain.splits.get(split)
        if not found:
            named = ", ".join(self._domain.splits)
            raise WorldError(f"domain {self.options.domain}: no task has split {split!r}; expected one of {named}")
        variable = self.options.user.api_key_env
        if not os.environ.get(variable):
            raise ConfigError(
                f"user simulator: no API key found; set environment variable {variable} (to any text if the endpoint "
                "needs no key), or name another variable in environment.options.user.api_key_env and in "
                "agent.pass_environment"
            )
        # If tau2 cannot be used, one of these raises now, before anything is started.
        self.job(found[0], Path())
        _ = self._description
        return list(found)

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        if task_id not in self._domain.tasks:
            raise WorldError(f"domain {self.options.domain}: no task {task_id!r}")
        return self._domain.tasks[task_id]

    async def open(self, task_id: str) -> TauWorld:
        """See `Environment`."""
        return TauWorld(self, self.task(task_id))

    def job(self, task_id: str, folder: Path) -> dict[str, Any]:
        """Build the job of one episode for `draco_ray.benchmarks.tau.play`, which writes into ``folder``.

        Raises: ConfigError: the user simulator's endpoint or provider cannot be used.
        """
        options = self.options
        variables = litellm_variables("environment.options.user", options.user, options.user.model, "")
        key = next(iter(variables))
        # LiteLLM has one endpoint per provider, so the policy needs another provider than the user simulator.
        agent = "openai" if options.user.model.startswith("hosted_vllm/") else "hosted_vllm"
        return {
            "python": find_python(options.tau2_python, self._home),
            "runner": str(RUNNER_SCRIPT),
            "domain": options.domain,
            "task": self._domain.tau2_ids[task_id],
            "evaluate": self.ground_truth,
            "seed": options.seed,
            "max_steps": options.max_steps,
            # No retries: what the endpoint rejects once, it rejects again.
            "agent": {"model": f"{agent}/policy", "provider": agent.upper(), "args": {"num_retries": 0}},
            "user": {"model": options.user.model, "args": sampling_arguments(options.user)},
            "judge": judge_job(options.judge),
            "keys": {key: options.user.api_key_env, JUDGE_KEY: options.judge.api_key_env},
            "passed": [*PASSED_ON, "NO_PROXY", "no_proxy", "TMPDIR", EPISODE_VARIABLE],
            "variables": {
                **{name: value for name, value in variables.items() if value},
                **tau2_base_env_vars(self._home),
                "LOGURU_LEVEL": "WARNING",
            },
            "results": str(folder / "results.json"),
            "judge_calls": str(folder / "judge_calls.jsonl"),
            "log": str(folder / "tau2.log"),
        }

    @functools.cached_property
    def _home(self) -> Path:
        return find_home(self.options.tau2_home, DOMAINS_FOLDER / self.options.domain)

    @functools.cached_property
    def _domain(self) -> Domain:
        return read_domain(self._home, self.options.domain)

    @property
    def _description(self) -> Mapping[str, Any]:
        """The domain's policy and tools."""
        _ = self._domain
        python = find_python(self.options.tau2_python, self._home)
        return _describe(python, self.options.tau2_version, self._home, self.options.domain)


@functools.cache
def _describe(python: str, version: str, home: Path, domain: str) -> Mapping[str, Any]:
    found: dict[str, Any] = check_package(python, version, home, domain)["domain"]
    if "error" in found:
        raise ConfigError(f"tau2_python {python}: domain {domain} cannot be loaded: {found['error']}")
    return found


class TauWorld:
    """One open task: a folder to which tau2 writes."""

    def __init__(self, environment: TauEnvironment, task: Task) -> None:
        self._environment = environment
        self._folder = PrivateTempDir()
        self._kept = self._folder.path / KEPT_FOLDER
        self._kept.mkdir()
        job = json.dumps(environment.job(task.task_id, self._kept))
        self.task = replace(task, fields={WORKSPACE_FIELD: str(self._folder.path), JOB_FIELD: job})

    async def act(self, action: str) -> str:
        """Check that tau2 has written its result file. Raises: EnvironmentCrashed."""
        self._episode()
        return ""

    async def evaluate(self) -> WorldVerdict:
        """Return tau2's reward. Raises: see `World`."""
        if not self._environment.ground_truth:
            raise WorldError(f"task {self.task.task_id}: the environment was opened without ground truth")
        episode = self._episode()
        if episode.termination_reason not in ENDED_WELL:
            return WorldVerdict(success=False, reward=0.0, failures=(episode.termination_reason,))
        reward = episode.reward_info
        if reward is None:
            problem = (episode.info or {}).get("evaluation_error")
            raise EnvironmentCrashed(f"task {self.task.task_id}: tau2 could not evaluate the episode: {problem}")
        parts = len(reward.reward_breakdown or {})
        return WorldVerdict(
            success=reward.success,
            reward=reward.reward,
            passed_tests=parts - len(reward.failed_parts),
            total_tests=parts,
            failures=reward.failed_parts,
        )

    async def keep(self, folder: Path) -> None:
        """Copy tau2's result file and log to ``folder``, keys masked: a provider's error may quote one."""
        options = self._environment.options
        scrubber = Scrubber(os.environ.get(each.api_key_env, "") for each in (options.user, options.judge))
        for file in self._kept.iterdir():
            scrubber.file(file)
        await asyncio.to_thread(shutil.copytree, self._kept, folder)

    async def close(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(self._folder.remove)

    def _episode(self) -> Episode:
        try:
            (episode,) = read_records(self._kept)
        except (TauBenchError, ValueError) as error:
            raise EnvironmentCrashed(f"task {self.task.task_id}: tau2 wrote no result file ({error!r})") from None
        return episode
