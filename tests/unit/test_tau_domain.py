"""A domain of tau2-bench as a training environment: tasks, splits, the job of an episode, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draco_ray.benchmarks.tau.environment import TauEnvironment, read_domain, short_id
from draco_ray.environments.tools.rows import check_id
from draco_ray.errors import ConfigError, WorldError
from draco_ray.training.session import task_prompts
from tests.support.tau2_installation import write_python, write_retail
from tests.support.tau_rollout import USER_KEY, tau_config, tau_environment

TELECOM = "[mms_issue]airplane_mode_on|bad_network_preference" + "|unseat_sim_card" * 12 + "[PERSONA:Hard]"


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAU2_HOME", "TAU2_PYTHON", "TAU2_USER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TAU2_PYTHON", str(write_python(tmp_path / "python")))


def made(home: Path, *overrides: str) -> TauEnvironment:
    return tau_environment(tau_config("http://user/v1", f"environment.options.tau2_home={home}", *overrides))


def test_tasks_and_splits_are_tau2s_own(tmp_path: Path) -> None:
    domain = read_domain(write_retail(tmp_path), "retail")
    assert domain.splits == {"train": ("0", "2"), "test": ("1",)}
    task = domain.tasks["2"]
    assert task.instruction == "Reason for the call: You want a refund.\nKnows: You are Yusuf Rossi."
    environment = made(tmp_path)
    with pytest.raises(WorldError, match="no task has split 'dev'; expected one of train, test"):
        environment.tasks("dev")
    with pytest.raises(WorldError, match="no task '7'"):
        environment.task("7")


def test_ids_are_names_of_files() -> None:
    assert short_id("17") == "17"
    ids = {short_id(TELECOM), short_id(TELECOM.replace("Hard", "Easy")), short_id("../../etc"), short_id("é☃")}
    assert len(ids) == 4
    for task_id in ids:
        check_id(task_id, "tau2")
        assert "/" not in task_id


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tasks.json": None}, r"not the task files of tau2-bench 1.0.1 \(FileNotFoundError"),
        ({"tasks.json": "version https://git-lfs"}, r"not the task files of tau2-bench 1.0.1 \(JSONDecodeError"),
        ({"tasks.json": [{"id": 3}]}, r"not the task files of tau2-bench 1.0.1"),
        ({"split_tasks.json": {"train": ["0", "9"]}}, "split 'train' lists 1 tasks missing in tasks.json: 9"),
    ],
)
def test_unusable_task_files_give_a_one_line_error(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        made(write_retail(tmp_path, **changed)).tasks("train")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["environment.options.domain=banking"], "domain: Input should be 'retail', 'airline' or 'telecom'"),
        (["environment.options.domane=retail"], "domane: Extra inputs are not permitted"),
        (["environment.options.user.api_key_env=OPENAI_API_KEY"], "the agent program's endpoint uses that variable"),
    ],
)
def test_invalid_options_give_a_one_line_error(tmp_path: Path, options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, *options)


def test_missing_parts_are_reported_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_retail(tmp_path)
    with pytest.raises(ConfigError, match="tau2_home is not set"):
        tau_environment(tau_config("http://user/v1")).tasks("train")
    with pytest.raises(
        ConfigError, match="user simulator: no API key found; set environment variable TAU2_USER_API_KEY"
    ):
        made(home).tasks("train")
    monkeypatch.setenv("TAU2_USER_API_KEY", USER_KEY)
    with pytest.raises(ConfigError, match="user.api_base: cannot be set for provider 'anthropic'"):
        made(home, "environment.options.user.model=anthropic/claude").tasks("train")
    bare = write_python(tmp_path / "bare", version=None, package=tmp_path)
    with pytest.raises(ConfigError, match="has no tau2 and is Python 3.*needs 3.12 or later"):
        made(home, f"environment.options.tau2_python={bare}").tasks("train")
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 2\n")
    old.chmod(0o755)
    with pytest.raises(ConfigError, match="does not run .* expected Python 3.12 or later"):
        made(home, f"environment.options.tau2_python={old}").tasks("train")


async def test_a_job_holds_no_key_and_gives_each_role_its_own_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAU2_USER_API_KEY", USER_KEY)
    world = await made(write_retail(tmp_path)).open("2")
    text = world.task.fields["tau2"]
    job = json.loads(text)
    assert USER_KEY not in text
    assert job["keys"]["OPENAI_API_KEY"] == "TAU2_USER_API_KEY"
    assert job["variables"]["OPENAI_API_BASE"] == "http://user/v1"
    assert (job["agent"]["model"], job["task"], job["evaluate"]) == ("hosted_vllm/policy", "2", False)
    await world.close()
    assert not Path(job["results"]).parent.exists()
    other = made(tmp_path, "environment.options.user.model=hosted_vllm/customer")
    assert other.job("2", tmp_path)["agent"]["model"] == "openai/policy"


def test_a_key_not_passed_to_the_program_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    keys = ["environment.options.user.api_key_env=CUSTOMER_KEY", "environment.options.judge.api_key_env=JUDGE_KEY"]
    config = tau_config("http://user/v1", *keys)
    with pytest.raises(
        ConfigError, match="^agent.pass_environment: CUSTOMER_KEY is missing; environment.use=tau needs it"
    ):
        task_prompts(config, tau_environment(config), [])
    assert tau_environment(tau_config("http://user/v1")).agent_variables == ["TAU2_USER_API_KEY"]
    monkeypatch.setenv("JUDGE_KEY", "-")
    assert tau_environment(config).agent_variables == ["CUSTOMER_KEY", "JUDGE_KEY"]
