"""Tasksets of the package ``verifiers`` as an environment: verifiers plays the episodes, in another process."""

from __future__ import annotations

import json

from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig, ModelConfig
from draco_ray.environments.base import Environment, WorldVerdict, list_items
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.records import Task
from draco_ray.verifiers.options import bridge_options_json, read_options, verifiers_python
from draco_ray.verifiers.process import Listing, end_bridge, list_taskset, shared_bridge

_HOW_AGENTS_ACT = """\
- The agent is a program with a loop and tools of its own, or talks with its environment. A step is a turn of the \
policy; what its tools returned stands as its output. The last turn is what the agent hands in.
- Turns of sub-agents, and those after a rewritten history, stand in branches of their own, in the order of time. What \
other agents or the environment said stands under their role.
- How the episode ended stands at the end, under PROGRAM."""


class VerifiersEnvironment(Environment):
    """``environment.use: verifiers``; see `VerifiersOptions` and docs/verifiers.md.

    The environment has a single action, which plays a whole episode (`draco_ray.verifiers.agent`) within
    ``environment.cell_timeout_seconds``.
    """

    def __init__(self, config: EnvironmentConfig, data: DataConfig, *, ground_truth: bool, name: str) -> None:
        """See `Environment`."""
        super().__init__(config, data, ground_truth=ground_truth, name=name)
        self.options = read_options(config)
        self.facts = "\n".join([_HOW_AGENTS_ACT, *list_items(self.options.facts)])

    @property
    def evaluates(self) -> bool:  # type: ignore[override]
        """Whether the taskset rewards episodes. Raises: as `tasks`."""
        return self._listing.rewarded

    def tasks(self, split: str) -> list[str]:
        """See `Environment`.

        Raises:
            WorldError: one line; there is no such split, or it is empty.
            ConfigError: one line; the taskset cannot be loaded.
        """
        found = self._listing.splits.get(split)
        if not found:
            named = ", ".join(self._listing.splits)
            raise WorldError(
                f"taskset {self.options.taskset.get('id')!r}: no task has split {split!r}; expected one of {named} "
                "(environment.options.splits)"
            )
        return list(found)

    def task(self, task_id: str) -> Task:
        """See `Environment`."""
        instructions = self._listing.instructions
        if task_id not in instructions:
            raise WorldError(f"taskset {self.options.taskset.get('id')!r}: no task {task_id!r}")
        return Task(task_id=task_id, instruction=instructions[task_id] or task_id)

    def check_model(self, model: ModelConfig, agent: AgentConfig) -> None:
        """See `Environment`; checks that the model's template can express the taskset's tools, if they are known."""
        offers = self._listing.tools
        if offers is None:
            return
        # Imported here, because listing tasks needs no tokenizer.
        from draco_ray.engine.chat import ChatTokenizer
        from draco_ray.engine.model_directory import load_tokenizer
        from draco_ray.engine.tool_calls import check_tool_calls_parsable

        chat = ChatTokenizer(load_tokenizer(model.path, model.chat_template), thinking=agent.thinking)
        try:
            check_tool_calls_parsable(chat, agent.tool_parser)
        except ConfigError as error:
            raise ConfigError(f"verifiers: {offers} gives tools to the policy, but {error}") from None

    async def open(self, task_id: str) -> VerifiersWorld:
        """See `Environment`."""
        return VerifiersWorld(self, self.task(task_id))

    async def stop(self) -> None:
        """See `Environment`."""
        await end_bridge(self.options, ground_truth=self.ground_truth)

    @property
    def _listing(self) -> Listing:
        told = bridge_options_json(self.options, ground_truth=False)
        return list_taskset(told, verifiers_python(self.options), tuple(self.options.pass_environment))


class VerifiersWorld:
    """An open task and the reward of its episode."""

    def __init__(self, environment: VerifiersEnvironment, task: Task) -> None:
        self._environment = environment
        self.task = task
        self._reward: float | None = None

    async def act(self, action: str) -> str:
        """Play the episode.

        Args:
            action: JSON: ``base_url``, ``model``, ``seconds``.

        Returns: JSON: ``traces``, ``errors``, ``timeout``, without rewards; or ``unusable``, why it cannot be played.
        Raises: EnvironmentCrashed.
        """
        environment, order = self._environment, json.loads(action)
        limit = environment.config.cell_timeout_seconds
        bridge = shared_bridge(environment.options, environment.config, ground_truth=environment.ground_truth)
        order |= {"task": self.task.task_id, "seconds": min(limit, order["seconds"])}
        answer = await bridge.play(order)
        self._reward = answer.pop("reward", None)
        return json.dumps(answer)

    async def evaluate(self) -> WorldVerdict:
        """See `World`."""
        environment, task_id = self._environment, self.task.task_id
        if not environment.ground_truth:
            raise WorldError(f"task {task_id}: the environment was opened without ground truth")
        if self._reward is None:
            raise EnvironmentCrashed(f"task {task_id}: the taskset gave the episode no reward")
        return WorldVerdict(success=self._reward >= environment.options.success_at, reward=self._reward)

    async def close(self) -> None:
        """See `World`."""
