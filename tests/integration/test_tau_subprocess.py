"""Evaluation end to end: an API policy, and a stand-in for tau2-bench under this Python."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from draco_ray.benchmarks.tau import evaluate as evaluate_module
from draco_ray.benchmarks.tau.config import TauBenchConfig
from draco_ray.benchmarks.tau.evaluate import evaluate_tau
from draco_ray.benchmarks.tau.results import simulation_files
from draco_ray.benchmarks.tau.server import api_policy
from draco_ray.benchmarks.tau.tau2_process import RUNNER_SCRIPT, find_tau2
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.child import Child
from draco_ray.errors import ConfigError, TauBenchError
from draco_ray.lab.evaluation.results import EvaluationDirectory
from draco_ray.lab.evaluation.setting import read_seeds
from tests.support.command import descendants, draco_here, start_draco
from tests.support.tau2_installation import STAND_IN, TASKS, write_home, write_python, write_shell_programs

pytestmark = pytest.mark.slow

SECRETS = {
    "OPENAI_API_KEY": "sk-user-0123456789",
    "TAU_JUDGE_KEY": "sk-judge-0123456789",
    "OPENROUTER_API_KEY": "sk-embed-0123456789",
    "UNRELATED_TOKEN": "token-0123456789",
}
AGENT = "openai_AGENT"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys in the environment, the shell tool's programs on PATH, temporary files in a folder of the test's own."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(write_shell_programs(tmp_path / "bin")), prepend=":")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def configure(machine: Path, script: dict[str, Any] | None = None, **tau: Any) -> DracoConfig:
    settings = {
        "tau2_python": str(write_python(machine / "python")),
        "tau2_home": str(write_home(machine / "home", script)),
        "judge": {"model": "openai/JUDGE", "api_base": "http://judge/v1", "api_key_env": "TAU_JUDGE_KEY"},
        "user": {"api_base": "http://user/v1"},
        "agent": {"api_base": "http://user/v1"},
        "embedder": {"api_base": "http://embedder/v1"},
        "embeddings_cache": str(machine / "embeddings"),
        "tasks": TASKS[:2],
        "trials": 2,
        **tau,
    }
    return DracoConfig.model_validate({"tau_bench": settings})


def evaluate(config: DracoConfig, out: Path, **options: Any) -> EvaluationDirectory:
    return evaluate_tau(config, [api_policy("openai/AGENT")], out, **options)


def starts(machine: Path) -> int:
    return len(list((machine / "home" / "data").glob("start_*")))


def failures(out: Path) -> Mapping[str, int]:
    found: dict[str, int] = json.loads((out / "summary.json").read_text())["measurements"][AGENT]["failures"]
    return found


def contents(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()}


def test_the_full_split_with_what_tau2_lost(machine: Path) -> None:
    """97 tasks: one unsolved, one always an infrastructure error."""
    script = {"rewards": {TASKS[0]: [1.0, 0.0, 1.0], TASKS[1]: [0.0, 0.0, 0.0]}, "errors": [TASKS[2]]}
    config = configure(machine, script, tasks=None, trials=3)
    out = machine / "out"
    result = read_seeds([evaluate(config, out, label="DRACO")])
    assert (result.label, len(result.plan.tasks), result.plan.split) == ("DRACO", 97, "full")
    assert [rate.mean for rate in result.tgc] == pytest.approx([(94 + share) / 97 for share in (2 / 3, 1 / 3, 0)])
    assert [rate.mean for rate in result.tgc_at] == pytest.approx([(94 + share) / 97 for share in (2 / 3, 1, 1)])
    assert result.turns is not None
    assert result.turns.mean == 2.0
    assert failures(out) == {"DB": 4, "infrastructure_error (RuntimeError)": 3}
    assert starts(machine) == 1
    assert list((machine / "tmp").iterdir()) == []


def test_settings_reach_tau2(machine: Path) -> None:
    out = machine / "out"
    evaluate(configure(machine), out)
    probe = json.loads((out / "tau2" / AGENT / "probe.json").read_text())
    assert probe["config"]["max_steps"] == 200
    assert probe["config"]["auto_resume"] is True
    assert probe["config"]["llm_agent"] == "openai/AGENT"
    assert probe["judge"] == {"model": "openai/JUDGE", "api_base": "http://judge/v1", "keyed": True}
    assert probe["embedder"] == {"model": "qwen/qwen3-embedding-8b", "base_url": "http://embedder/v1"}
    assert Path(probe["cache"]).parent == machine / "embeddings"
    summary = json.loads((out / "summary.json").read_text())["measurements"][AGENT]
    assert summary["costs"]["judge"]["input_tokens"] == 100


def test_keys_are_in_no_file_and_no_argument(machine: Path) -> None:
    """Even if tau2 prints a key and stores it in a result file, as with a provider's error."""
    out = machine / "out"
    evaluate(configure(machine, {"quote": "OPENAI_API_KEY"}), out)
    assert "incorrect key ***" in (out / "tau2" / AGENT / "runner.log").read_text()
    probe = json.loads((out / "tau2" / AGENT / "probe.json").read_text())
    assert not {"UNRELATED_TOKEN", "TAU_JUDGE_KEY"} & set(probe["variables"])
    written = {**contents(out), **contents(machine / "embeddings"), **contents(machine / "tmp")}
    leaks = [path for path, text in written.items() if any(secret in text for secret in SECRETS.values())]
    assert leaks == []
    assert not [word for word in probe["arguments"] if any(secret in word for secret in SECRETS.values())]


def test_the_agents_shell_sees_no_keys_and_no_solutions(machine: Path) -> None:
    out = machine / "out"
    (machine / "home").mkdir()
    (machine / "home" / ".env").write_text("OPENAI_API_KEY=sk-another")
    evaluate(configure(machine), out)
    probe = json.loads((out / "tau2" / AGENT / "probe.json").read_text())
    names = {line.partition("=")[0] for line in probe["shell"] if "=" in line}
    assert names <= {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PWD", "SHLVL", "_", "OLDPWD"}
    assert probe["denied"] == ["~/.ssh", str(machine / "home" / "data"), str(machine / "home" / ".env"), str(out)]
    # Temporary files and the working directory are private, and gone.
    assert Path(probe["tmp"]).parents[1] == machine / "tmp"
    assert probe["folder"] == probe["tmp"]
    assert not Path(probe["tmp"]).exists()


def test_a_crash_is_survived(machine: Path) -> None:
    out = machine / "out"
    assert read_seeds([evaluate(configure(machine, {"crash": [1, 2]}), out)]).tgc[0].mean == 1.0
    assert starts(machine) == 3


def test_a_stalled_process_is_ended_and_started_again(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = machine / "out"
    config = configure(machine, {"hang": [1]})
    wait = evaluate_module._wait
    waits: list[Child] = []

    def impatient(child: Child, folder: Path, stall_seconds: float, progress: Callable[[int], None]) -> str | None:
        """Only the first process is waited for briefly, and only once it hangs: starting takes what it takes."""
        waits.append(child)
        if len(waits) > 1:
            return wait(child, folder, stall_seconds, progress)
        while not simulation_files(folder):
            assert child.returncode is None
            time.sleep(0.05)
        return wait(child, folder, 1.0, progress)

    monkeypatch.setattr(evaluate_module, "_wait", impatient)
    assert read_seeds([evaluate(config, out)]).tgc[0].mean == 1.0
    assert starts(machine) == 2


def test_finished_episodes_are_kept_and_the_same_command_continues(machine: Path) -> None:
    out = machine / "out"
    config = configure(machine, {"crash": [1, 1]}, restarts=1)
    with pytest.raises(TauBenchError, match="ended with exit code 9, 2 times in total; 2 of 4 episodes are kept"):
        evaluate(config, out)
    kept = contents(out / "tau2" / AGENT / "simulations")
    with pytest.raises(ConfigError, match="0 of 4 rollouts are finished"):
        read_seeds([EvaluationDirectory.open(out)])
    assert read_seeds([evaluate(config, out)]).tgc[0].mean == 1.0
    assert kept.items() <= contents(out / "tau2" / AGENT / "simulations").items()
    evaluate(config, out)
    assert starts(machine) == 3  # nothing was left to run


def test_ctrl_c_ends_tau2_and_keeps_what_was_finished(machine: Path) -> None:
    out = machine / "out"
    command = [*tau_run(machine, configure(machine, {"hang": [1]}, trials=2)), "--label", "GPT"]
    process = start_draco(command)
    kept = out / "tau2" / "openai_gpt-5.4" / "simulations"
    while not list(kept.glob("[!.]*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    tau2, *_ = descendants(process.pid, str(RUNNER_SCRIPT))
    with pytest.raises(ConfigError, match="another process is using it"), EvaluationDirectory.open(out).claimed():
        pass
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert process.returncode == 130, stdout + stderr
    assert f"stopped; 1 of 2 episodes are in {out}" in stderr
    assert not tau2.is_running()
    done = draco_here(*command)
    assert done.returncode == 0, done.stderr
    assert EvaluationDirectory.open(out).finished() == 2


def test_infrastructure_errors_are_run_again_when_asked_for(machine: Path) -> None:
    out = machine / "out"
    config = configure(machine, {"errors": [TASKS[1]]})
    assert read_seeds([evaluate(config, out)]).tgc[0].mean == 0.5
    (machine / "home" / "data" / "script.json").write_text("{}")
    assert read_seeds([evaluate(config, out)]).tgc[0].mean == 0.5
    assert read_seeds([evaluate(config, out, retry_errors=True)]).tgc[0].mean == 1.0


def test_another_evaluation_is_not_continued(machine: Path) -> None:
    out = machine / "out"
    config = configure(machine)
    evaluate(config, out)
    changed = TauBenchConfig.of(config).model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match="seed was 300, but is 7 in this command"):
        evaluate(config.model_copy(update={"tau_bench": changed}), out)


def test_nothing_is_run_if_a_patched_part_of_tau2_is_missing(machine: Path) -> None:
    """A patch that finds nothing to patch would leave its leak open."""
    package = machine / "package"
    for file in STAND_IN.rglob("*.py"):
        copy = package / file.relative_to(STAND_IN)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text().replace("_create_srt_settings", "_create_settings"))
    config = configure(machine, tau2_python=str(write_python(machine / "other", package=package)))
    with pytest.raises(TauBenchError, match="tau2 was not started: SandboxManager._create_srt_settings does not exist"):
        evaluate(config, machine / "out")
    assert starts(machine) == 0


def refusal(machine: Path, **tau: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        find_tau2(TauBenchConfig.of(configure(machine, **tau)))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_missing_python_is_refused(machine: Path) -> None:
    assert "nowhere: not an executable file; expected the Python of tau2-bench" in refusal(
        machine, tau2_python="nowhere"
    )


def test_a_python_without_tau2_is_refused(machine: Path) -> None:
    python = write_python(machine / "other", version=None, package=machine)
    assert "has no tau2 and is Python 3." in refusal(machine, tau2_python=str(python))


def test_the_physics_program_of_that_name_is_refused(machine: Path) -> None:
    package = machine / "package"
    (package / "tau2").mkdir(parents=True)
    (package / "tau2" / "__init__.py").write_text("")
    python = write_python(machine / "other", version="0.3", package=package)
    assert "tau2 0.3 is not tau2-bench or is incomplete" in refusal(machine, tau2_python=str(python))


def test_another_version_is_refused(machine: Path) -> None:
    python = write_python(machine / "other", version="0.2.0")
    assert "tau2 0.2.0; expected 1.0.1, because grading changed" in refusal(machine, tau2_python=str(python))


def test_a_checkout_without_its_tasks_is_refused(machine: Path) -> None:
    (machine / "empty").mkdir()
    assert "expected a checkout of tau2-bench" in refusal(machine, tau2_home=str(machine / "empty"))


def test_a_checkout_of_other_tasks_is_refused(machine: Path) -> None:
    config = configure(machine)
    next((machine / "home").rglob("task_*.json")).unlink()
    with pytest.raises(ConfigError, match="96 tasks in .*; expected the 97"):
        find_tau2(TauBenchConfig.of(config))


def test_missing_shell_programs_are_named(machine: Path) -> None:
    (machine / "bin" / "srt").unlink()
    assert "srt not on PATH" in refusal(machine)


def overrides(config: DracoConfig) -> list[str]:
    """The words of a command with the machine's settings, one task."""
    words = [
        f"tau_bench.{name}={value}"
        for name, value in TauBenchConfig.of(config).model_dump().items()
        if name in ("tau2_python", "tau2_home", "trials", "embeddings_cache")
    ]
    return [*words, f"tau_bench.tasks=[{TASKS[0]}]", "tau_bench.judge.api_key_env=TAU_JUDGE_KEY"]


def tau_run(machine: Path, config: DracoConfig) -> list[str]:
    policy = ["--policy", "litellm:openai/gpt-5.4", "--out", str(machine / "out")]
    return ["tau", "run", "qwen3.6-27b", *policy, *overrides(config)]


def test_the_command_prints_its_tables(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(machine)
    command = tau_run(machine, config)
    done = draco_here(*command, "--label", "GPT", "--format", "markdown")
    assert done.returncode == 0, done.stderr
    assert "| GPT | 100.0 | 100.0 |" in done.stdout
    with monkeypatch.context() as patch:
        patch.setenv("TAU_JUDGE_KEY", "")
        assert "judge: no API key found" in draco_here("tau", "run", *command[2:]).stderr
    again = draco_here(*command, "--label", "GPT")
    assert again.returncode == 0, again.stderr
    assert starts(machine) == 1  # the same evaluation, and it was there
    printed = draco_here("tau", "tables", str(machine / "out"), "--format", "csv")
    assert "GPT" in printed.stdout
    assert printed.returncode == 0, printed.stderr


def eval_set(machine: Path, config: DracoConfig, *more: str) -> list[str]:
    """A set of two API policies on τ-bench, two episodes each."""
    file = machine / "set.yaml"
    if not file.exists():
        settings = {
            name: {"policy": f"litellm:openai/{name}", "config": "qwen3.6-27b"} for name in ("gpt-5.4", "gpt-5.4-mini")
        }
        wanted = {"splits": ["tau-banking"], "settings": settings, "overrides": overrides(config)}
        file.write_text(json.dumps(wanted))
    return ["eval-set", str(file), "--out", str(machine / "out"), *more]


def test_a_killed_set_continues_without_repeating_anything(machine: Path) -> None:
    config = configure(machine, {"hang": [9, 1]}, trials=2)
    command = eval_set(machine, config)
    process = start_draco(command)
    first, second = (machine / "out" / name / "tau-banking" for name in ("gpt-5.4", "gpt-5.4-mini"))
    while not list(second.rglob("simulations/[!.]*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    tau2, *_ = descendants(process.pid, str(RUNNER_SCRIPT))
    process.kill()
    process.communicate()
    psutil.wait_procs([tau2], timeout=600)
    assert (first / "summary.json").is_file()
    assert not (second / "summary.json").is_file()
    kept, begun = contents(first), starts(machine)

    for changed, said in (
        (["tau_bench.seed=7"], f"evaluation {first}: seed was 300, but is 7 in this command"),
        (["tau_bench.trials=3"], f"evaluation {first}: runs was 2, but is 3 in this command"),
    ):
        refused = draco_here(*command, *changed)
        assert refused.returncode == 2, refused.stderr
        # The line before it is about the checkout, which is none.
        assert said in refused.stderr.splitlines()[-1]
    assert starts(machine) == begun

    done = draco_here(*command, "--against", "gpt-5.4", "--format", "markdown")
    assert done.returncode == 0, done.stderr
    assert f"{machine / 'out'}: 1 of 2 evaluations are finished" in done.stdout
    assert "2 of 2: gpt-5.4-mini on tau-banking" in done.stdout
    assert "| gpt-5.4 | **100.0** |" in done.stdout
    assert "| gpt-5.4-mini | **100.0** |" in done.stdout
    assert "| gpt-5.4-mini - gpt-5.4 on τ-bench, SR p^1 |" in done.stdout
    assert contents(first) == kept
    assert starts(machine) == begun + 1
    written = {path.name for path in (machine / "out" / "tables").iterdir()}
    assert {"main.tex", "main.md", "main.txt", "consistency.csv", "comparison.md"} <= written

    again = draco_here(*command)
    assert again.returncode == 0, again.stderr
    assert "2 of 2 evaluations are finished" in again.stdout
    assert starts(machine) == begun + 1


def test_a_set_that_loses_too_much_stops_with_one_line(machine: Path) -> None:
    """Both policies lose their only task; the second is not started."""
    config = configure(machine, {"errors": [TASKS[0]]}, trials=2)
    command = eval_set(machine, config)
    stopped = draco_here(*command)
    assert stopped.returncode == 3, stopped.stderr
    *_, line = stopped.stderr.splitlines()
    assert "2 of 2 rollouts were lost, more than max_lost_share=0.05" in line
    assert "add --retry-errors to the same command" in line
    assert not (machine / "out" / "gpt-5.4-mini").exists()
    (machine / "home" / "data" / "script.json").write_text("{}")
    assert draco_here(*command).returncode == 3
    assert starts(machine) == 1
    done = draco_here(*command, "--retry-errors")
    assert done.returncode == 0, done.stderr
    assert starts(machine) == 3
