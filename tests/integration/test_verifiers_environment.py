"""verifiers' own processes play, with a policy that says the lines of a script behind a real endpoint."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from draco_ray.config.load import load_config
from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.environments.base import GuardedWorld, WorldVerdict, make_environment
from draco_ray.environments.program import EPISODE_VARIABLE
from draco_ray.errors import ConfigError, EnvironmentCrashed, WorldError
from draco_ray.judging.render import agent_trajectory
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.agent import RolloutRequest
from draco_ray.rollout.endpoint.server import shared_endpoint
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.training.session import task_prompts
from draco_ray.verifiers.agent import VerifiersAgent
from tests.conftest import REPOSITORY
from tests.support.endpoint_episode import END, TOKENIZER, ScriptedSampler

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verifiers")]

IN_ORDER = pytest.mark.asyncio(loop_scope="module")
TASKS = REPOSITORY / "tests/support/verifiers_tasks.py"
TOOLS: dict[str, Any] = {
    "taskset": {"id": str(REPOSITORY / "tests/support/verifiers_tools.py")},
    "env": {"agent": {"harness": {"id": None}}},
    "splits": {"train": {}},
}
TALK = REPOSITORY / "examples/parcels"
WITHOUT_TOOLS = (
    "{%- for each in messages %}{{- '<|im_start|>' + each.role + '\\n' + each.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, as a model has it."""
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def toolless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model whose chat template has no place for tools."""
    folder = tmp_path_factory.mktemp("toolless")
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = WITHOUT_TOOLS
    tokenizer.save_pretrained(folder)
    return folder


class Player:
    """The agent with one environment."""

    def __init__(self, environment: Any, agent: VerifiersAgent, sampler: ScriptedSampler) -> None:
        self.environment, self.sampler, self._agent = environment, sampler, agent

    async def play(self, kind: str) -> tuple[Trajectory, GuardedWorld]:
        """One episode."""
        world = GuardedWorld(await self.environment.open(kind), "verifiers", 400)
        request = RolloutRequest(task_id=kind, group=f"step1/{kind}", rollout=0, attempt=0, seed=5)
        return await self._agent.run(world, request), world


def playing(environment: Any, model: Path, seconds: float = 300) -> Player:
    """An agent of its own for an environment."""
    config = AgentConfig(thinking=False, timeout_seconds=seconds)
    sampler = ScriptedSampler(lambda prompt: f"Done.{END}")
    policy = TokenPolicy(sampler, ChatTokenizer(AutoTokenizer.from_pretrained(model), thinking=False), config)
    return Player(environment, VerifiersAgent(policy, config, "{task_description}"), sampler)


@asynccontextmanager
async def player(model: Path, *, truth: bool = False, **options: Any) -> AsyncIterator[Player]:
    told = {"taskset": {"id": str(TASKS)}, "path": [str(TALK)], "splits": {"all": {}}}
    environment = make_environment(
        EnvironmentConfig(use="verifiers", options={**told, **options}, start_timeout_seconds=200),
        DataConfig(),
        ground_truth=truth,
    )
    try:
        yield playing(environment, model)
    finally:
        await environment.stop()
        await shared_endpoint().stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kinds(model: Path) -> AsyncIterator[Any]:
    """The environment of `TASKS`, for three tests that run in order; the last one ends its processes."""
    async with player(model) as at:
        yield at.environment


@IN_ORDER
async def test_episodes_are_played_and_recorded_and_without_ground_truth_nothing_is_rewarded(
    kinds: Any, model: Path
) -> None:
    at = playing(kinds, model)
    assert at.environment.evaluates
    assert at.environment.tasks("all")[0] == "talk"
    # What a task does not say its environment does: its name is no task.
    assert at.environment.task("untold").instruction == (
        "Be brief.\n\nTask untold: the environment says what is to be done as it begins."
    )
    talked, world = await at.play("talk")
    assert (talked.ended, talked.error, talked.branches) == (EpisodeEnd.FINISHED, None, (0,))
    assert [step.text for step in talked.steps] == ["Done.", "Done."]
    assert [turn.text for turn in talked.turns if turn.role == "user"] == ["Do talk.", "Go on."]
    assert {step.policy_version for step in talked.steps} == {3}
    # What the policy saw and sampled is what is trained on, to the token.
    assert at.sampler.asked[1] + at.sampler.sampled[1] == talked.token_ids_T.tolist()
    assert int(talked.sampled_T.sum()) == sum(map(len, at.sampler.sampled))
    with pytest.raises(WorldError, match="without ground truth"):
        await world.evaluate()
    # Its reward function has a bug, and nobody has called it.
    assert (await at.play("unrewarded"))[0].ended is EpisodeEnd.FINISHED
    twice, _ = await at.play("twice")
    assert len(twice.branches) == 2
    assert [step.branch for step in twice.steps] == [0, 0, 1]
    judged, _ = await at.play("judged")
    assert next(turn.role for turn in judged.turns) == "other"
    assert len(judged.steps) == 2
    # The first of its turns was another agent's, of which no token is trained on.
    assert at.sampler.asked[-1] + at.sampler.sampled[-1] == judged.token_ids_T.tolist()
    raised, _ = await at.play("raise")
    assert raised.ended is EpisodeEnd.CRASHED
    assert "the environment cannot read that move" in str(raised.error)
    assert len(raised.steps) == 1
    silent, _ = await at.play("silent")
    assert silent.ended is EpisodeEnd.SERVER_ERROR
    assert "verifiers sent no request to the policy" in str(silent.error)
    # All of them side by side, in one process.
    many = await asyncio.gather(*(at.play("talk") for _ in range(8)))
    assert {each.ended for each, _ in many} == {EpisodeEnd.FINISHED}
    for each in (talked, twice, judged, raised):
        assert "SECRET" not in agent_trajectory(each, "c0de")


async def test_rewards_are_the_evaluation_where_there_is_ground_truth(model: Path) -> None:
    async with player(model, truth=True, env={"player": {"harness": {"id": None}}}) as at:
        # verifiers' own harness, a program that is started for every turn, with the Python of its environment.
        played, world = await at.play("talk")
        assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
        assert len(played.steps) == 2
        assert await world.evaluate() == WorldVerdict(success=False, reward=0.5)
        unrewarded, world = await at.play("unrewarded")
        assert unrewarded.ended is EpisodeEnd.SERVER_ERROR
        with pytest.raises(EnvironmentCrashed, match="gave the episode no reward"):
            await world.evaluate()


async def test_tools_are_called_as_the_models_chat_template_writes_them(toolless: Path, model: Path) -> None:
    async with player(model, **TOOLS) as at:
        call = '<tool_call>\n{"name": "shelf_look", "arguments": {"place": "shelf 3"}}\n</tool_call>'
        at.sampler.lines = lambda prompt: f"{'It is gone.' if 'Nothing is on shelf 3' in prompt else call}{END}"
        played, _ = await at.play("find")
        assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
        assert [step.observation for step in played.steps] == ["Nothing is on shelf 3.", None]
        assert "Tools you may call" in TOKENIZER.decode(at.sampler.asked[0])
        assert at.sampler.asked[1] + at.sampler.sampled[1] == played.token_ids_T.tolist()
        # Where it has no place for them no other attempt mends it: the run ends with the first episode.
        with pytest.raises(
            ConfigError, match=r"gives tools to the policy, but .* does not support tools .*chat_template"
        ):
            await playing(at.environment, toolless).play("find")


async def test_a_harness_speaks_any_dialect_of_the_endpoint(model: Path) -> None:
    taskset = {"id": str(REPOSITORY / "tests/support/verifiers_dialects.py")}
    async with player(model, taskset=taskset, env={"agent": {"harness": {"id": "verifiers_dialects"}}}) as at:
        tasks = at.environment.tasks("all")
        assert len(tasks) == 6
        for number, task in enumerate(tasks):
            played, _ = await at.play(task)
            assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
            assert at.sampler.asked[number] + at.sampler.sampled[number] == played.token_ids_T.tolist()
            assert [(turn.role, turn.text) for turn in played.turns[:-1]] == [
                ("user", "Hello."),
                ("assistant", "Done."),
            ]


@IN_ORDER
async def test_what_an_episode_lacks_ends_the_run(kinds: Any, model: Path) -> None:
    with pytest.raises(ConfigError, match="required packages are missing: ModuleNotFoundError: No module named 'a_p"):
        await playing(kinds, model).play("lacks")


@IN_ORDER
async def test_an_episode_is_ended_at_its_time_and_a_server_that_dies_is_replaced(kinds: Any, model: Path) -> None:
    at = playing(kinds, model, seconds=20)
    hung, _ = await at.play("hang")
    assert hung.ended is EpisodeEnd.CRASHED
    assert "did not end within its time" in str(hung.error)
    assert [step.text for step in hung.steps] == ["Done."]
    ours = [each for each in psutil.Process().children(recursive=True) if _marked(each)]
    assert ours
    for each in ours:
        os.kill(each.pid, signal.SIGKILL)
    psutil.wait_procs(ours)
    # That it has gone is seen now or with the next episode, which is then played again by the run.
    for _ in range(2):
        again, _ = await at.play("talk")
    assert again.ended is EpisodeEnd.FINISHED
    died, _ = await at.play("die")
    assert died.ended is EpisodeEnd.SERVER_ERROR
    assert "died" in str(died.error)
    assert (await at.play("talk"))[0].ended is EpisodeEnd.FINISHED
    await kinds.stop()
    assert not [each for each in psutil.Process().children(recursive=True) if _marked(each)]


def test_a_model_without_tools_is_refused_before_anything_starts_where_tools_are_known_of(
    model: Path, toolless: Path
) -> None:
    def preflight(folder: Path, **options: Any) -> None:
        config = load_config("verifiers", [f"model.path={folder}"])
        environment = EnvironmentConfig(use="verifiers", options=options)
        config = config.model_copy(update={"environment": environment})
        task_prompts(config, make_environment(environment, DataConfig()), [])

    with pytest.raises(ConfigError) as caught:
        preflight(toolless, **TOOLS)
    said = str(caught.value)
    assert "taskset 'verifiers_tools' gives tools to the policy" in said
    assert f"the chat template of '{toolless}' does not support tools" in said
    assert "or set model.chat_template" in said
    assert "\n" not in said
    kinds = {"taskset": {"id": str(TASKS)}, "path": [str(TALK)]}
    bash = {"player": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}}
    with pytest.raises(ConfigError, match="harness 'bash' gives tools to the policy"):
        preflight(toolless, **kinds, env=bash)
    preflight(toolless, **kinds)
    preflight(model, **TOOLS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"taskset": {"id": "not-there"}}, "taskset 'not-there' is not installed; install its package with"),
        (
            {"taskset": {"id": "{folder}/lacks.py"}},
            "required packages are missing: ModuleNotFoundError: No module named",
        ),
        ({"taskset": {"id": "{folder}/plain.py"}}, "harness 'bash' lets the policy run programs"),
        ({"taskset": {"id": str(TASKS), "speed": 3}}, "taskset.speed: Extra inputs are not permitted"),
        ({"python": "/bin/false"}, "verifiers: the taskset could not be loaded (status 1)"),
        ({"python": "/nowhere"}, "is not an executable file; correct environment.options.python"),
        ({"wrong": 1}, "environment.options: wrong: Extra inputs are not permitted"),
        ({"sampling": {"chat_template_kwargs": {}}}, "sampling.chat_template_kwargs: Extra inputs are not permitted"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    (tmp_path / "lacks.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "plain.py").write_text(
        "import verifiers.v1 as vf\n__all__ = ['Plain']\n"
        "class Plain(vf.Taskset[vf.Task]):\n    def load(self):\n        yield vf.Task(vf.TaskData(prompt='Go.'))\n"
    )
    if "id" in options.get("taskset", {}):
        options = {"taskset": {**options["taskset"], "id": options["taskset"]["id"].replace("{folder}", str(tmp_path))}}
    told = {"taskset": {"id": str(TASKS)}, "path": [str(TALK)], **options}
    with pytest.raises(ConfigError) as caught:
        make_environment(EnvironmentConfig(use="verifiers", options=told), DataConfig()).tasks("train")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def _marked(process: psutil.Process) -> bool:
    try:
        return EPISODE_VARIABLE in process.environ()
    except psutil.Error:
        return False
