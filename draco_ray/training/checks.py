"""The checks before a run starts. `draco check` prints all findings; `draco train` stops if there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rich.console import Console

from draco_ray.algorithm.rules import find_rule
from draco_ray.config.schema import DracoConfig, LearnerConfig
from draco_ray.engine.tool_calls import ToolCallReader
from draco_ray.engine.vllm_engine import check_argument_names
from draco_ray.environments.base import Environment
from draco_ray.errors import ConfigError, DracoError
from draco_ray.judging.judge_context import model_positions
from draco_ray.learner.base import find_learner
from draco_ray.records import Message
from draco_ray.rollout.agent import agent_template, find_agent
from draco_ray.rollout.tokens import EnginePolicies
from draco_ray.training.cluster import LOCAL_JUDGE_SLOTS, check_resources
from draco_ray.training.preflight import (
    cached_config,
    check_disk,
    check_object_store,
    check_outlives_job,
    check_trainable,
)
from draco_ray.training.session import chat_tokens, checked_model, say_cut_prompts, usable_prompts, with_environment
from draco_ray.training.sizes import context_problems, ray_address
from draco_ray.training.trainer import TaskOrder


@dataclass(slots=True)
class CheckContext:
    """A run to be started: its configuration, and results of the checks that later checks use."""

    config: DracoConfig
    """Configuration of the run. The checks complete it: they make the model's path absolute, and give the judge the
    environment's facts."""
    console: Console
    environment: Environment | None = None
    has_model: bool = False
    """Whether the check of the model has passed."""
    prompts: dict[str, tuple[Message, ...]] | None = None
    """Prompts of the usable training tasks, by task id."""
    order: TaskOrder | None = None


Check = Callable[[CheckContext], None]
"""A check raises DracoError if the run cannot start, and does nothing if an earlier check that it depends on failed."""


def check_rule_and_learner(start: CheckContext) -> None:
    """Check that the advantage rule and the learner exist."""
    algorithm = start.config.algorithm
    find_rule(algorithm.rule, algorithm.reliability)
    find_learner(start.config.learner.use)


def check_environment(start: CheckContext) -> None:
    """Check that the environment has the splits' tasks; adapt the configuration if it has no evaluator."""
    config, environment = with_environment(start.config)
    environment.tasks(config.data.train_split)
    if not environment.evaluates:
        config = _without_evaluator(config, start.console)
    if config.train.evaluate_before_after and not environment.tasks(config.data.eval_split):
        raise ConfigError(
            f"data.eval_split={config.data.eval_split}: environment.use={config.environment.use} has no task in this "
            "split; name another one, or set train.evaluate_before_after=false"
        )
    start.config, start.environment = config, environment


def check_agent(start: CheckContext) -> None:
    """Check that the agent and the template of its prompt exist."""
    agent = start.config.agent
    find_agent(agent.use)
    if agent.prompt is not None:
        agent_template(agent.prompt, "")


def check_program(start: CheckContext) -> None:
    """Run the agent's own check of its program, if the agent has such a check."""
    agent = start.config.agent
    if (check := getattr(find_agent(agent.use), "check", None)) is not None:
        check(agent, EnginePolicies(samplers=(), tokenizer=None))


def check_model(start: CheckContext) -> None:
    """Check that the model exists and can be trained and sharded as configured."""
    config = start.config = checked_model(start.config)
    start.has_model = True
    if config.learner.use == LearnerConfig().use:
        check_trainable(config.model.path, config.learner, config.engine.tensor_parallel)


def check_context(start: CheckContext) -> None:
    """Check that the model's context is long enough for rollouts and, if it is its own judge, for judge prompts."""
    path = start.config.model.path
    positions = model_positions(path, cached_config(path))
    if problems := context_problems(start.config, positions):
        raise ConfigError("; ".join(problems))


def check_prompts(start: CheckContext) -> None:
    """Check that the chat template can render the tasks' prompts, and that enough of these are short enough."""
    config, environment = start.config, start.environment
    if not start.has_model:
        return
    if environment is None:
        # Without an environment there are no tasks, so check only the chat template.
        chat = chat_tokens(config)
        if config.agent.use == "tool_calling":
            chat.written_call()
        return
    prompts = usable_prompts(config, environment, start.console, config.train.prompts_per_step)
    if config.train.evaluate_before_after:
        held_out = environment.tasks(config.data.eval_split)[: config.data.eval_tasks]
        say_cut_prompts(config, environment, held_out, start.console)
    start.prompts, start.order = prompts, task_order(config, list(prompts))


def check_engine_arguments(start: CheckContext) -> None:
    """Check the names in ``engine.vllm``, if vLLM is on the driver's node."""
    check_argument_names(start.config.engine.vllm)


def check_tool_parser(start: CheckContext) -> None:
    """Check that ``agent.tool_parser`` exists and works with the model's tokenizer, if vLLM is on this node."""
    config = start.config
    if config.agent.tool_parser is not None and start.has_model and find_spec("vllm") is not None:
        ToolCallReader(chat_tokens(config), config.agent.tool_parser)


def check_machine(start: CheckContext) -> None:
    """Check CPUs, GPUs and object store if Ray is started here; a cluster is checked after joining it."""
    config = start.config
    if ray_address(config) is not None:
        return
    check_resources(config, [machine_resources(config)])
    if config.ray.object_store_mib is not None:
        check_object_store(config, config.ray.object_store_mib << 20)


def machine_resources(config: DracoConfig) -> dict[str, float]:
    """The resources of a Ray cluster that is started on this machine."""
    gpus = 0
    if config.engine.gpus_per_engine or config.learner.gpus_per_worker or config.judge.local.enabled:
        import torch

        gpus = torch.cuda.device_count()
    return {"CPU": max(os.cpu_count() or 1, 2), "GPU": gpus, "judge": LOCAL_JUDGE_SLOTS}


def check_root(start: CheckContext) -> None:
    """Check that a new run directory is writable, outlives the job, and has room for a step."""
    root = start.config.run.root
    check_outlives_job(root)
    if isinstance(root, str):
        return
    folder = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"run.root={root}: {folder} cannot be written; set run.root to a folder this user owns")
    check_disk(start.config, folder)


CHECKS: tuple[Check, ...] = (
    check_rule_and_learner,
    check_environment,
    check_agent,
    check_program,
    check_model,
    check_context,
    check_prompts,
    check_engine_arguments,
    check_tool_parser,
    check_machine,
)
"""The checks of every run; later ones use results of earlier ones."""


def run_checks(start: CheckContext, checks: Sequence[Check]) -> list[DracoError]:
    """Run the checks and return all findings, each once."""
    found: dict[str, DracoError] = {}
    for check in checks:
        try:
            check(start)
        except DracoError as error:
            found.setdefault(str(error), error)
    return list(found.values())


def raise_findings(found: Sequence[DracoError]) -> None:
    """Raise a single finding as it is, and several as one ConfigError that lists them."""
    if len(found) == 1:
        raise found[0]
    if found:
        listed = "; ".join(f"({number}) {error}" for number, error in enumerate(found, start=1))
        raise ConfigError(f"{len(found)} problems prevent this run: {listed}")


def task_order(config: DracoConfig, tasks: Sequence[str]) -> TaskOrder:
    """The order of a run's tasks. Raises: ConfigError if the order needs a judge's verdicts and there is no judge."""
    train = config.train
    if train.skip_solved is not None and config.algorithm.reward != "rubric":
        raise ConfigError(
            "train.skip_solved: a judge's verdicts determine the solved tasks, so algorithm.reward must be rubric, "
            f"found {config.algorithm.reward}"
        )
    return TaskOrder(tasks, train.prompts_per_step, config.seed, skip_solved=train.skip_solved, behind=train.staleness)


def _without_evaluator(config: DracoConfig, console: Console) -> DracoConfig:
    """The configuration for an environment without an evaluator. Raises: ConfigError if the reward needs one."""
    name = f"environment.use={config.environment.use}"
    if config.algorithm.reward == "outcome":
        raise ConfigError(f"algorithm.reward=outcome: {name} has no evaluator; set algorithm.reward=rubric")
    if not config.train.evaluate_before_after:
        return config
    if config.algorithm.reward == "rubric" and not config.judge.self_judge.enabled:
        console.print(f"{name} has no evaluator: the judge's pass rate on held-out tasks is measured instead")
        return config
    # The policy changes between the two measurements, so as its own judge it cannot compare them.
    why = "the policy is its own judge" if config.algorithm.reward == "rubric" else "there is no judge"
    console.print(f"{name} has no evaluator and {why}: held-out tasks are not measured")
    return config.updated(train={"evaluate_before_after": False, "evaluate_every": None})
