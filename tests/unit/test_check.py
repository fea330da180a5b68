"""`draco check` finds everything that stops a run, at once and with what to set; a run stops at the same list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from draco_ray.cli import main
from draco_ray.commands import check as command
from draco_ray.commands import new
from draco_ray.commands.new import new_environment
from draco_ray.config import machine
from draco_ray.config.load import load_config
from draco_ray.errors import ConfigError
from draco_ray.training import sizes
from draco_ray.training.checks import CheckContext, check_machine, machine_resources
from draco_ray.training.run import train
from draco_ray.training.session import checked_model
from draco_ray.training.sizes import context_problems
from tests.support.tiny_model import build_tiny_model


@pytest.fixture
def shop(tmp_path: Path) -> list[str]:
    """The command line's words for a new environment, a tiny model whose template has no tools, and a judge."""
    folder = tmp_path / "shop"
    new_environment(folder)
    model = build_tiny_model(tmp_path / "model")
    words = [str(folder / "small.yaml"), f"model.path={model}", f"run.root={tmp_path / 'runs'}"]
    return [*words, "agent.max_prompt_length=1024"]


def found(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line[:1].isdigit()]
    assert ended.value.code == (2 if lines else 0), err
    return lines


def test_a_run_that_can_start_has_no_findings(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert found([*shop, "model.chat_template=hermes"], capsys) == []


def test_all_findings_come_at_once_with_keys_and_values(
    shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    broken = ["environment.slots=48", "environment.slots_per_worker=1", "environment.cpus_per_worker=1"]
    broken += ["engine.kv_cache_gib=0.00001", "agent.max_response_length=4000"]
    broken += ["judge.rule_judge.start=false", "judge.model=openai/none", "judge.api_base=http://127.0.0.1:9/v1"]
    context, template, cpus, cache, judge = found([*shop, *broken, "judge.max_attempts=1"], capsys)[:5]
    assert "set agent.max_response_length=1024" in context
    assert "does not support tools" in template
    assert "set model.chat_template, e.g. to hermes" in template
    assert "need 98 CPUs" in cpus
    assert "(e.g. environment.slots_per_worker=48 and environment.cpus_per_worker=0)" in cpus
    assert "raise engine.kv_cache_gib to 0.1" in cache
    assert "judge openai/none at http://127.0.0.1:9/v1: not reachable" in judge


def test_tools_that_do_not_start_are_found(shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tmp_path / "shop" / "tools.py"
    tools.write_text(tools.read_text() + "\n\ndef reset(task: dict) -> None:\n    raise OSError('no stock room')\n")
    (line,) = found([*shop, "model.chat_template=hermes"], capsys)
    assert "task pen: cannot be started: reset: OSError: " in line
    assert "no stock room" in line


def test_tasks_that_are_too_long_are_found(shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "shop" / "tasks.jsonl"
    told = [json.loads(line) for line in rows.read_text().splitlines()]
    for row in told:
        row["instruction"] *= 200
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    (line,) = found([*shop, "model.chat_template=hermes"], capsys)
    assert "2 of 2 training tasks are left out" in line
    assert "agent.max_prompt_length=1024 tokens; the longest has" in line


def test_a_missing_model_hides_nothing_else(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = found([*shop, "model.path=/nowhere/at/all", "data.train_split=none", "algorithm.rule=none"], capsys)
    assert [word for line, word in zip(lines, ("algorithm.rule", "none", "/nowhere"), strict=True) if word in line]


def test_a_missing_model_does_not_hide_a_missing_program(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program = ["agent.use=command", "agent.command=python my_agent.py", "model.path=/nowhere/at/all"]
    assert any("file 'my_agent.py' does not exist" in line for line in found([*shop, *program], capsys))


def test_a_missing_file_of_tools_hides_neither_prompt_nor_template(
    shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tools.py", "prompt.txt"):
        (tmp_path / "shop" / name).unlink()
    tools, prompt, template = found(shop, capsys)
    assert f"file {tmp_path}/shop/tools.py does not exist" in tools
    assert f"agent prompt '{tmp_path}/shop/prompt.txt' does not exist" in prompt
    assert "does not support tools" in template


def test_a_finding_of_two_checks_is_listed_once(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    judge = ["judge.rule_judge.start=false", "judge.self_judge={enabled: true, context_tokens: 9000}"]
    lines = found([*shop, "model.chat_template=hermes", *judge], capsys)
    assert len([line for line in lines if "context_tokens=9,000, but" in line]) == 1


def test_an_agent_that_cannot_call_the_tools_is_found(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = found([*shop, "agent.use=code"], capsys)
    assert "agent.use=code: task 'pen' has tools; set agent.use=tool_calling" in line


def test_a_folder_for_runs_that_is_a_file_is_found(
    shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (line,) = found([*shop, "model.chat_template=hermes", f"run.root={tmp_path}/file/runs"], capsys)
    assert f"{tmp_path}/file cannot be written; set run.root" in line


def test_a_model_may_be_named_from_the_home(
    shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found([*shop, "model.path=~/model", "model.chat_template=hermes"], capsys) == []
    assert checked_model(load_config("cpu", ["model.path=~/model"])).model.path == str(tmp_path / "model")


def test_a_run_stops_at_the_same_findings(shop: list[str], tmp_path: Path) -> None:
    config = load_config(shop[0], [*shop[1:], "engine.cpus_per_engine=500", "agent.max_response_length=4000"])
    with pytest.raises(ConfigError, match=r"^3 problems prevent this run: \(1\) agent.max_prompt.* \(3\) .* CPUs"):
        train(config, Console(quiet=True))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_fit_into_memory_is_not_started(
    shop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shop, "model.chat_template=hermes", "engine.kv_cache_gib=1000000", "agent.tool_parser=hermess"]
    for more in ([], ["--resume-or-start", "run.name=one"]):
        with pytest.raises(SystemExit, match="2"):
            main(["train", *words, *more])
        said = capsys.readouterr().err
        assert "2 problems prevent this run: (1) agent.tool_parser='hermess': unknown" in said
        assert "of memory, but this machine has" in said
    assert not (tmp_path / "runs").exists()


def test_the_memory_of_other_learners_and_of_clusters_is_not_estimated(
    shop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*shop[1:], "engine.kv_cache_gib=1000000"]
    start = CheckContext(load_config(shop[0], words), Console(quiet=True), has_model=True)
    with pytest.raises(ConfigError, match="of memory, but this machine has"):
        command.check_memory(start)
    other = load_config(shop[0], [*words, "learner.use=double"])
    command.check_memory(CheckContext(other, Console(quiet=True), has_model=True))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    command.check_memory(start)


def test_memory_that_the_machine_does_not_have_is_found(
    shop: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = found([*shop, "model.chat_template=hermes", "engine.kv_cache_gib=1000000"], capsys)
    assert "of memory, but this machine has" in line
    monkeypatch.setattr(command, "host_bytes", lambda *_: machine.memory_bytes() - 1)
    assert found([*shop, "model.chat_template=hermes"], capsys) == []


def test_a_context_that_is_extended_by_hand_is_not_refused() -> None:
    config = load_config("cpu", ["model.path=x"])
    assert context_problems(config, 2048) == []
    assert "agent.max_prompt_length=500 and agent.max_response_length=500" in context_problems(config, 1000)[0]
    assert context_problems(config, None) == []
    longer = load_config("cpu", ["model.path=x", "engine.vllm={hf_overrides: {max_position_embeddings: 4096}}"])
    assert context_problems(longer, 1000) == []


def test_the_preset_cpu_fits_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr(machine, "has_bfloat16", lambda: False)
    values = machine.cpu_values()
    assert values["model"] == {"dtype": "float32"}
    assert values["engine"] == {"cpus_per_engine": 4, "kv_cache_gib": 0.5}
    assert values["learner"] == {"cpus_per_worker": 4, "micro_batch_tokens": 2048}
    config = load_config("cpu")
    assert config.environment.slots == config.train.prompts_per_step * config.algorithm.group_size
    assert machine_resources(config)["GPU"] == 0


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_new_environment_asks_for_no_more_than_the_machine_has(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: count)
    monkeypatch.setattr(new, "cores", lambda: count)
    monkeypatch.setattr(new, "has_gpu", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: count)
    new_environment(tmp_path / "shop")
    source = str(tmp_path / "shop" / "environment.yaml")
    check_machine(CheckContext(load_config(source, ["model.path=x"]), Console(quiet=True)))
    with pytest.raises(ConfigError, match="CPUs"):
        check_machine(CheckContext(load_config(source, [f"engine.cpus_per_engine={count}"]), Console(quiet=True)))


@pytest.mark.parametrize(
    ("own", "files", "cores", "gib"),
    [
        ("0::/", {"cpu.max": "250000 100000", "memory.max": f"{3 << 30}"}, 2, 3),
        # A group within a limited one, as under systemd or Slurm.
        ("0::/job/step", {"job/cpu.max": "100000 100000", "job/step/cpu.max": "max 100000", "memory.max": "max"}, 1, 8),
        ("0::/a", {"memory.max": f"{4 << 30}", "a/memory.max": f"{2 << 30}"}, 4, 2),
        (
            "4:memory:/job\n1:cpu,cpuacct:/job\n0::/",
            {
                "memory/job/memory.limit_in_bytes": f"{1 << 30}",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu/job/cpu.cfs_quota_us": "300000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            3,
            1,
        ),
        # A container that sees only its own group.
        ("4:memory:/docker/0123", {"memory/memory.limit_in_bytes": f"{2 << 30}"}, 4, 2),
        ("0::/../../other", {}, 4, 8),
        (None, {}, 4, 8),
    ],
)
def test_limits_of_control_groups_count(
    own: str | None,
    files: dict[str, str],
    cores: int,
    gib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    if own is not None:
        (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 21}[name])
    assert (machine.cores(), machine.memory_bytes()) == (cores, gib << 30)


def test_threads_sleep_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert machine.thread_env_vars(2.5) == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert machine.thread_env_vars(0.5) == {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE"}


def test_activations_are_kept_where_memory_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(tmp_path / "model")
    for tokens, checkpointing in ((4096, False), (10**12, True)):
        config = load_config("cpu", [f"model.path={model}", f"learner.micro_batch_tokens={tokens}"])
        assert checked_model(config).learner.gradient_checkpointing is checkpointing
    config = load_config("cpu", [f"model.path={model}", "learner.gpus_per_worker=1"])
    assert checked_model(config).learner.gradient_checkpointing is True
    # A run's processes leave no memory for activations here, even if it is free now.
    monkeypatch.setattr(sizes, "memory_bytes", lambda: sizes.PROCESSES_BYTES)
    assert checked_model(load_config("cpu", [f"model.path={model}"])).learner.gradient_checkpointing is True


def test_names_that_only_vllm_knows_are_found(shop: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*shop, "model.chat_template=hermes", "engine.vllm={kv_cache_dtyp: fp8}", "agent.tool_parser=hermess"]
    argument, parser = found(words, capsys)
    assert "engine.vllm.kv_cache_dtyp: vLLM has no such argument; did you mean kv_cache_dtype" in argument
    assert "agent.tool_parser='hermess': unknown; expected one of" in parser
