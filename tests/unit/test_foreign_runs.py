"""A run directory of somebody else starts no program, sends no key and weakens no jail unless the user says so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.config.keys import dotted_keys
from draco_ray.config.load import dump_config, keys_needing_confirmation, load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.errors import ConfigError, DamagedRun
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore
from draco_ray.training.resume import adopt_config, rewind
from tests.support.small_checkpoint import small_checkpoint
from tests.support.small_run import small_run
from tests.unit.test_runs import a_trajectory

NAMED = {
    "environment.appworld_python": "/tmp/evil/python",
    "environment.isolation": "rlimits",
    "judge.model": "huggingface/https://evil.example/v1",
    "judge.api_base": "http://evil.example/v1",
    "judge.api_key_env": "AWS_SECRET_ACCESS_KEY",
    "judge.cache": "/home/me/.config",
    "engine.adapter_directory": "/home/me",
    "algorithm.rule": "/tmp/evil.py:Rule",
    "learner.use": "/tmp/evil.py:Learner",
    "ray.address": "evil.example:6379",
    "tau_bench.tau2_python": "/tmp/evil/python",
    "tau_bench.tau2_home": "/tmp/evil",
    "tau_bench.agent.api_base": "http://evil.example/v1",
    "tau_bench.user.model": "oobabooga/http://evil.example",
    "tau_bench.user.api_key_env": "AWS_SECRET_ACCESS_KEY",
    "tau_bench.judge.api_base": "http://evil.example/v1",
    "tau_bench.embedder.api_base": "http://evil.example/v1",
    "tau_bench.embeddings_cache": "/home/me",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of this machine; another value of the variable is another user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_run(path: Path, *overrides: str) -> Path:
    return RunDirectory.create(
        path, dump_config(load_config("sandbox", ["judge.rule_judge.start=false", *overrides]))
    ).path


def received(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """A run that another user made."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path.parent / "their home"))
        return make_run(path, *overrides)


@pytest.mark.parametrize("key", sorted(NAMED))
def test_a_received_run_needs_a_word_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    run = received(tmp_path / "run", monkeypatch, f"{key}={NAMED[key]}", "learner.lora_rank=3")
    extending = tmp_path / "mine.yaml"
    extending.write_text(f"extends: {run}\nseed: 3\n")
    for source in (run, run / "config.yaml", extending):
        with pytest.raises(ConfigError) as caught:
            load_config(str(source))
        assert f"{key}={NAMED[key]}" in str(caught.value)
        assert "--trust" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert load_config(str(run), trust=True).learner.lora_rank == 3
    # What the user says is theirs, here and in a file of theirs that extends the run.
    mine = load_config(str(run), [f"{key}={NAMED[key]}"])
    assert mine.learner.lora_rank == 3


@pytest.mark.parametrize("place", ["beside.yaml", "sub/below.yaml", "sub/../sub/below.yaml", "../elsewhere.yaml"])
def test_what_a_received_run_extends_is_theirs_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run = received(tmp_path / "run", monkeypatch)
    (run / "sub").mkdir()
    Path(run, place).write_text("environment: {appworld_python: /tmp/evil/python}\n")
    (run / "run.json").unlink()
    for extends in (f"./{place}", str(run / place), f"[sandbox, ./{place}]"):
        (run / "config.yaml").write_text(f"extends: {extends}\n")
        with pytest.raises(ConfigError, match="sets environment.appworld_python=/tmp/evil/python"):
            load_config(str(run))
    (run / "config.yaml").write_text("extends: sandbox\n")
    assert load_config(str(run)) == load_config("sandbox")


def test_a_file_of_a_received_run_is_theirs_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = received(tmp_path / "run", monkeypatch, "environment.appworld_python=/tmp/evil/python")
    below = run / "checkpoints" / "step-0001"
    below.mkdir(parents=True)
    shutil.copy(run / "config.yaml", below / "mine.yaml")
    link, extending = tmp_path / "mine.yaml", tmp_path / "extending.yaml"
    link.symlink_to(run / "config.yaml")
    extending.write_text("extends: ./mine.yaml\n")
    for source in (link, extending, below / "mine.yaml"):
        with pytest.raises(ConfigError, match="sets environment.appworld_python=/tmp/evil/python"):
            load_config(str(source))


def test_an_option_of_ones_own_does_not_vouch_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "environment.options={tools: [/theirs/tools.py]}"
    run = received(tmp_path / "run", monkeypatch, theirs, "learner.lora_rank=3")
    extending = tmp_path / "mine.yaml"
    extending.write_text(f"extends: {run}\nenvironment:\n  options:\n    facts: Be brief.\n")
    for source, overrides in ((run, []), (extending, []), (run, ["environment.options.facts=brief"])):
        with pytest.raises(ConfigError, match="/theirs/tools.py.*--trust"):
            load_config(str(source), overrides)
    assert load_config(str(extending), trust=True).environment.options["facts"] == "Be brief."


def test_an_argument_of_vllm_of_ones_own_does_not_vouch_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = received(tmp_path / "run", monkeypatch, "engine.vllm={worker_extension_cls: evil.Code}")
    for overrides in ([], ["engine.vllm.kv_cache_dtype=fp8"]):
        with pytest.raises(ConfigError, match=r"engine\.vllm=.*evil\.Code.*--trust"):
            load_config(str(run), overrides)
    assert load_config(str(run), trust=True).engine.vllm == {"worker_extension_cls": "evil.Code"}


def test_every_key_that_names_a_program_an_endpoint_or_a_place_to_write_is_confirmed() -> None:
    confirmed = keys_needing_confirmation().keys()
    assert set(NAMED) < confirmed
    telling = (
        "python",
        "tau2_home",
        "api_base",
        "api_key_env",
        "isolation",
        "address",
        "cache",
        "adapter_directory",
        "rule",
        "use",
        "jury",
        "held_out",
        "strong",
        "fallbacks",
        "command",
        "folder",
        "pass_environment",
        "arguments",
    )
    # Says when the provider keeps what prompts share: no place of ours.
    no_place = {"judge.prompt_cache"}
    named = {key for key in dotted_keys() if key.rsplit(".", 1)[-1].endswith(telling)} - no_place
    # Whatever an environment takes: files of tools, commands, addresses; and an agent that is a program.
    # Whatever vLLM takes: classes of workers, code of the model's.
    named |= {"engine.vllm"}
    named |= {"environment.options", "agent.command", "agent.folder", "agent.harness", "agent.pass_environment"}
    named |= {"agent.container"}
    # An object store, and the folder that is copied to it.
    named |= {"run.root", "run.local"}
    # Models by name, that may be addresses. The embedder's goes to its own endpoint whatever it says.
    named |= {key for key in dotted_keys() if key.startswith(("judge.", "tau_bench.")) and key.endswith(".model")}
    named -= {"tau_bench.embedder.model"}
    assert named == confirmed
    shutil_like = ("command", "program", "class", "module", "entry", "url", "hook", "script", "plugin", "executable")
    assert not [key for key in set(dotted_keys()) - named if any(word in key for word in shutil_like)]


def test_a_run_of_ones_own_is_resumed_as_it_is_also_elsewhere(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *(f"{key}={value}" for key, value in NAMED.items()))
    assert load_config(str(run)).environment.isolation == "rlimits"
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    assert load_config(str(moved)).judge.api_base == NAMED["judge.api_base"]
    new = load_config(str(moved), ["judge.api_base=http://127.0.0.1:8011/v1"])
    adopt_config(RunDirectory.open(moved), new)
    assert load_config(str(moved)) == new


def test_what_others_write_into_a_run_of_ones_own_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    theirs = received(tmp_path / "theirs", monkeypatch, "judge.api_base=http://evil.example/v1")
    shutil.copyfile(theirs / "config.yaml", run / "config.yaml")
    with pytest.raises(ConfigError, match="changed since the run wrote it"):
        load_config(str(run))
    for damage in ("{}", "[]", json.dumps({"signature": "0" * 64}), json.dumps({"signature": 3})):
        (run / "run.json").write_text(damage)
        with pytest.raises(ConfigError, match="judge.api_base"):
            load_config(str(run))
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match="judge.api_base"):
        load_config(str(run))


def test_a_received_run_with_defaults_needs_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = received(tmp_path / "run", monkeypatch, "algorithm.rule=grpo", "learner.use=ray_lora")
    assert load_config(str(run)) == load_config("sandbox", ["judge.rule_judge.start=false", "algorithm.rule=grpo"])


def test_where_no_key_can_be_kept_a_run_is_nobodys(tmp_path: Path, home: Path) -> None:
    home.write_text("no folder")
    run = make_run(tmp_path / "run", "environment.isolation=rlimits")
    with pytest.raises(ConfigError, match="environment.isolation=rlimits"):
        load_config(str(run))


def test_the_key_is_made_once_and_is_private(tmp_path: Path, home: Path) -> None:
    make_run(tmp_path / "a")
    key = (home / "draco-ray" / "key").read_bytes()
    make_run(tmp_path / "b")
    assert (home / "draco-ray" / "key").read_bytes() == key
    assert len(key) == 32
    assert [path.stat().st_mode & 0o077 for path in (home / "draco-ray").iterdir()] == [0]


COMMANDS = {
    "train": ["train", "RUN"],
    "resume": ["train", "--resume", "RUN"],
    "author": ["rubric", "author", "RUN", "--out", "OUT"],
    "evaluate": ["evaluate", "--policy", "RUN"],
    "evaluate with its config": ["evaluate", "--policy", "litellm:openai/x", "--config", "RUN"],
    "replay": ["replay", "RUN", "--judge", "own"],
    "replay by the policy": ["replay", "RUN", "--judge", "policy", "--step", "1"],
    "pair": ["replay", "RUN", "--judge", "rules", "--phase", "union", "--pairing", "own"],
    "bench": ["attribution-bench", "--judge", "own", "--config", "RUN", "--out", "OUT"],
    "tau run": ["tau", "run", "RUN", "--policy", "base", "--out", "OUT"],
    "tau check": ["tau", "check", "RUN"],
}


STOPPED_LATER = {
    "train": "data root",
    "resume": "data root",
    "author": "data root",
    "bench": "sandbox.json",
    "tau check": "/tmp/evil",
    "replay by the policy": "model .cache/nowhere",
}
"""What these stop at once they are trusted; the others would start Ray."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_would_act_on_it_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = small_run(tmp_path / "run").path
    small_checkpoint(run / "checkpoints" / "step00001")
    nowhere = ("data.root=/nowhere", "model.path=.cache/nowhere")
    theirs = received(tmp_path / "theirs", monkeypatch, *nowhere, *(f"{key}={value}" for key, value in NAMED.items()))
    for file in ("config.yaml", "run.json"):
        shutil.copyfile(theirs / file, run / file)
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in COMMANDS[name]]
    with pytest.raises(SystemExit) as end:
        main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert all(f"{key}={value}" in line for key, value in NAMED.items())
    if name in STOPPED_LATER:
        with pytest.raises(SystemExit):
            main([*words, "--trust"])
        assert STOPPED_LATER[name] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["config", "RUN"],
        ["replay", "RUN", "--judge", "rules"],
        ["replay", "RUN"],
        ["runs", "show", "RUN"],
        ["runs", "cost", "RUN"],
        ["report", "RUN"],
    ],
)
def test_reading_it_needs_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = small_run(tmp_path / "run").path
    theirs = received(tmp_path / "theirs", monkeypatch, *(f"{key}={value}" for key, value in NAMED.items()))
    for file in ("config.yaml", "run.json"):
        shutil.copyfile(theirs / file, run / file)
    try:
        main([word.replace("RUN", str(run)) for word in words])
    except SystemExit as end:
        assert not end.code  # noqa: PT017
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", ["metrics.jsonl.tmp", "checkpoints", "tables/steps", "tables/steps/step00001/x.tmp"])
def test_a_link_out_of_a_received_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    run = received(tmp_path / "run", monkeypatch)
    (tmp_path / "mine").mkdir()
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).symlink_to(tmp_path / "mine")
    with pytest.raises(DamagedRun, match="this link leads out of a run directory"):
        RunDirectory.open(run)
    (run / place).unlink()
    (run / place).symlink_to(run / "config.yaml")
    RunDirectory.open(run)


def test_ones_own_run_may_keep_checkpoints_on_another_disk(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert RunDirectory.open(run).checkpoint_steps() == []


@pytest.mark.parametrize("task", ["../../../../up", "/absolute", "a/b", "..", ""])
def test_what_a_table_says_leads_out_of_no_folder(tmp_path: Path, task: str) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "run", dump_config(DracoConfig())))
    made = rows.trajectory_rows(1, a_trajectory())
    store.write("trajectories", 1, "x", [{**made[0], "task_id": task}])
    store.finish_step(1, {"step": 1})
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "run")}
    if task in ("..", ""):
        # With the rollout's number behind it these are plain names.
        rewind(store.directory, reuse=True)
    else:
        with pytest.raises(DamagedRun, match="rows of step 1 have the invalid name"):
            rewind(store.directory, reuse=True)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "run")} == before


def test_a_run_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        store = RunStore(RunDirectory.create(tmp_path / "deep" / "run", "seed: 1\n"))
        store.write("trajectories", 1, "x", rows.trajectory_rows(1, a_trajectory()))
        store.write("trajectories", 2, "x", rows.trajectory_rows(2, a_trajectory()))
        store.finish_step(1, {"step": 1})
    finally:
        os.umask(before)
    run = store.directory.path
    assert run.stat().st_mode & 0o777 == 0o700
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "run.json",
        "config.yaml",
        "metrics.jsonl",
        "step00001.parquet",
        "x.arrow",
    }
    assert [path for path in files if path.stat().st_mode & 0o077] == []
