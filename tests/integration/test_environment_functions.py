"""AppWorld by function calling: its documents are the tools, and a call is made in the code agent's own world."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from draco_ray.config.load import load_config
from draco_ray.config.schema import DataConfig, EnvironmentConfig
from draco_ray.environments.appworld.functions import AppWorldFunctions
from draco_ray.environments.base import GuardedWorld, World, make_environment
from draco_ray.errors import ConfigError, WorldError
from draco_ray.records import EpisodeEnd, Termination
from draco_ray.rollout.agent import RolloutRequest, agent_template, find_agent
from draco_ray.rollout.tokens import TokenPolicy
from tests.support.endpoint_episode import CHAT, END, ScriptedSampler, call

pytestmark = pytest.mark.slow
on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")

APPS = {"apps": ["spotify"]}


def environment(root: Path, **options: Any) -> AppWorldFunctions:
    config = EnvironmentConfig(use="appworld_functions", options=options)
    made = make_environment(config, DataConfig(root=root), ground_truth=True)
    assert isinstance(made, AppWorldFunctions)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spotify(sandbox_root: Path) -> AsyncIterator[AppWorldFunctions]:
    made = environment(sandbox_root, **APPS)
    yield made
    await made.stop()


def question(root: Path, made: AppWorldFunctions) -> tuple[str, Any]:
    """A training task that asks for something, and the answer, which only this test reads."""
    for task_id in made.tasks("train"):
        answer = json.loads((root / "data/tasks" / task_id / "ground_truth/answer.json").read_text())
        if answer is not None:
            return task_id, answer
    raise AssertionError("no task asks for an answer")


async def act(world: World, name: str, **arguments: Any) -> str:
    return await world.act(json.dumps({"name": name, "arguments": arguments}))


@on_the_modules_loop
async def test_apis_are_called_and_what_fails_is_said(spotify: AppWorldFunctions) -> None:
    world = await spotify.open(spotify.tasks("train")[0])
    passwords = json.loads(await act(world, "supervisor__show_account_passwords"))
    assert {"account_name", "password"} <= passwords[0].keys()
    for arguments in (
        {},
        {"username": "nobody", "password": "wrong"},
        {"no_such": 1},
        {"username": [None, {"a": 1.5}]},
    ):
        said = await act(world, "spotify__login", **arguments)
        assert said.startswith("error: spotify__login: ")
        assert "\n" not in said
    assert await act(world, "spotify__no_such") == "error: spotify__no_such: no such function"
    assert (await act(world, "venmo__login")) == "error: venmo__login: no such function"
    # What stands in names and arguments is data, whatever it looks like.
    assert (await act(world, "spotify__login(); import os #")).endswith("no such function")
    hostile = {"username": "\"'); print('out') #", "password": "{x!r}\n\\", "__import__('os')": 1}
    assert "out\n" not in await act(world, "spotify__login", **hostile)


@on_the_modules_loop
async def test_a_rollout_of_the_tool_calling_agent_is_evaluated(sandbox_root: Path, spotify: AppWorldFunctions) -> None:
    task_id, answer = question(sandbox_root, spotify)
    config = load_config("appworld-functions", ["agent.thinking=false"]).agent
    lines = [
        call("supervisor__show_account_passwords"),
        call("supervisor__complete_task", answer=answer, status="success"),
        f"I am done.{END}",
    ]
    policy = TokenPolicy(ScriptedSampler(lines), CHAT, config)
    agent = find_agent(config.use)(policy, config, agent_template(config.prompt, spotify.agent_prompt))
    world = await spotify.open(task_id)
    request = RolloutRequest(task_id=task_id, group="g", rollout=0, attempt=0, seed=1)
    played = await agent.run(world, request)
    assert played.ended is EpisodeEnd.FINISHED
    assert "account_name" in (played.steps[0].observation or "")
    assert not (played.steps[1].observation or "").startswith("error")
    assert spotify.termination(played) is Termination.SUBMITTED
    assert spotify.termination(replace(played, ended=EpisodeEnd.CRASHED)) is Termination.CRASHED
    # The tools are in the prompt, those of other apps and what marks AppWorld's data are not.
    tools = next(message.content for message in played.prompt if message.role == "tools")
    assert "spotify__login" in tools
    assert "venmo__login" not in tools
    assert "canary" not in tools
    verdict = await world.evaluate()
    assert verdict.success, verdict.failures


@on_the_modules_loop
async def test_a_program_behind_the_endpoint_plays_the_same_world(
    sandbox_root: Path, spotify: AppWorldFunctions
) -> None:
    task_id, answer = question(sandbox_root, spotify)
    config = load_config("appworld-endpoint", ["agent.thinking=false"])
    assert (config.environment.use, config.agent.use) == ("appworld_functions", "command")
    lines = [
        call("supervisor__show_account_passwords"),
        call("venmo__login"),
        call("supervisor__complete_task", answer=answer, status="success"),
        f"I am done.{END}",
    ]
    policy = TokenPolicy(ScriptedSampler(lines), CHAT, config.agent)
    agent = find_agent("command")(policy, config.agent, agent_template(config.agent.prompt, spotify.agent_prompt))
    world = GuardedWorld(await spotify.open(task_id), "spotify", 60)
    played = await agent.run(world, RolloutRequest(task_id=task_id, group="g", rollout=0, attempt=0, seed=1))
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None), played.turns[-1].text
    assert "account_name" in (played.steps[0].observation or "")
    assert played.steps[1].observation == "error: venmo__login: no such function"
    assert spotify.termination(played) is Termination.SUBMITTED
    # The documents are the tools of its requests, and the prompt's two parts are two messages.
    opening = {turn.role: turn.text for turn in played.turns[:3]}
    assert "spotify__login" in opening["tools"]
    assert opening["system"].startswith("You are an assistant")
    assert opening["user"].startswith("I am ")
    verdict = await world.evaluate()
    assert verdict.success, verdict.failures
    await world.close()


def test_the_judge_is_told_of_functions_and_of_no_code(spotify: AppWorldFunctions, sandbox_root: Path) -> None:
    assert "supervisor__complete_task" in spotify.facts
    assert "<code>" not in spotify.facts
    few = environment(sandbox_root, apps=["simple_note"])
    assert "- Tool `simple_note__" in few.facts


def test_what_cannot_be_used_is_one_line(sandbox_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment.options.apps: unknown app 'spotfy'; expected one of .*spotify"):
        environment(sandbox_root, apps=["spotfy"]).facts  # noqa: B018
    with pytest.raises(ConfigError, match=r"environment.options: appz: "):
        environment(sandbox_root, appz=["spotify"])
    with pytest.raises(WorldError, match="no API documents for function calling"):
        environment(tmp_path).facts  # noqa: B018
