"""A slot's life: episodes, evaluation, blindness, crashes, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from draco_ray.config.schema import AgentConfig, EnvironmentConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.sampler import Sample
from draco_ray.environments.appworld.data_root import load_split
from draco_ray.environments.appworld.slot import AppWorldSlot
from draco_ray.errors import EnvironmentCrashed, WorldError
from draco_ray.records import EpisodeEnd, Trajectory
from draco_ray.rollout.agent import RolloutRequest, agent_template
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from draco_ray.rollout.worker import evaluate
from tests.support.chat_tokenizer import QWEN3, chat_tokenizer
from tests.support.tool_call_reader import ToolCallReaderMixin
from tests.support.worlds import Tasks, attack, check_next_task_runs_clean, play, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def root(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world in which one task has no ground truth, so that AppWorld is loaded once for it and the others."""
    root = tmp_path_factory.mktemp("root") / "world"
    shutil.copytree(sandbox_root, root)
    shutil.rmtree(root / "data" / "tasks" / blind_task(root) / "ground_truth")
    return root


def blind_task(root: Path) -> str:
    """That task, which `tasks` does not hand out."""
    return load_split(root, "dev")[0]


@pytest.fixture(scope="module")
def tasks(root: Path) -> Tasks:
    return Tasks(root)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slot(root: Path, tasks: Tasks) -> AsyncIterator[AppWorldSlot]:
    slot = AppWorldSlot(EnvironmentConfig(), root, load_ground_truth=True, name="usual")
    yield slot
    await slot.open(tasks.next())
    processes, template = processes_of(slot), template_of(slot)
    await slot.close()
    assert psutil.wait_procs(processes, timeout=600)[1] == []
    # The shared template is still running for the next slot.
    assert template.is_running()


def template_of(slot: AppWorldSlot) -> psutil.Process:
    """The process that a slot's was forked from."""
    template = processes_of(slot)[0].parent()
    assert template is not None
    return template


async def test_an_episode(slot: AppWorldSlot, tasks: Tasks) -> None:
    task_id = tasks.next()
    task = (await slot.open(task_id)).task
    assert task.task_id == task_id
    assert await slot.act("task = apis.supervisor.show_active_task()\nprint(task['instruction'])") == (
        task.instruction + "\n"
    )
    # State is kept between cells, and silence has a message of AppWorld's.
    assert await slot.act("numbers = [1, 2]") == "Execution successful."
    assert await slot.act("numbers.append(3)\nprint(sum(numbers))") == "6\n"
    error = await slot.act("print(1)\nmissing")
    assert error.startswith("Execution failed. Traceback:")
    assert "NameError" in error
    for cell in tasks.solution(task_id):
        assert "Execution failed" not in await slot.act(cell)
    verdict = await slot.evaluate()
    assert verdict.success
    assert verdict.passed_tests == verdict.total_tests > 0
    assert verdict.difficulty in (1, 2, 3)
    assert verdict.failures == ()
    with pytest.raises(RuntimeError, match="has already been evaluated"):
        await slot.act("print(1)")
    await slot.close()
    with pytest.raises(RuntimeError, match="no task is open"):
        _ = slot.task


async def test_a_task_that_was_not_done_fails(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    verdict = await slot.evaluate()
    assert not verdict.success
    assert 0 < len(verdict.failures) == verdict.total_tests - verdict.passed_tests


async def test_a_task_begins_anew_whenever_it_is_opened(slot: AppWorldSlot, tasks: Tasks) -> None:
    task_id = tasks.next()
    for _ in range(2):
        await slot.open(task_id)
        assert await slot.act("print('kept' in globals())") == "False\n"
        assert not (await slot.evaluate()).success
        await slot.open(task_id)
        await slot.act("kept = 1")
        for cell in tasks.solution(task_id):
            await slot.act(cell)
        assert (await slot.evaluate()).success


async def test_a_task_that_is_not_there(slot: AppWorldSlot) -> None:
    with pytest.raises(WorldError, match="has no task 'nothing_1'"):
        await slot.open("nothing_1")


async def test_an_outcome_blind_slot_works_where_there_is_no_ground_truth(root: Path, tasks: Tasks) -> None:
    task_id = blind_task(root)
    assert not list((root / "data" / "tasks" / task_id).rglob("ground_truth"))
    blind = AppWorldSlot(EnvironmentConfig(), root, load_ground_truth=False, name="blind")
    seeing = AppWorldSlot(EnvironmentConfig(), root, load_ground_truth=True, name="seeing")
    try:
        task = (await blind.open(task_id)).task
        told = await blind.act("print(apis.supervisor.show_active_task()['instruction'])")
        assert told == task.instruction + "\n"
        for cell in tasks.solution(task_id):
            assert "Execution failed" not in await blind.act(cell)
        with pytest.raises(WorldError, match="blind was started without ground truth and cannot evaluate"):
            await blind.evaluate()
        # The server refuses too, should the slot ever ask.
        answer = await blind._ask(task_id, {}, begin="evaluate")
        assert answer["error"] == "this slot was started without ground truth"
        await seeing.open(task_id)
        with pytest.raises(WorldError, match="cannot be evaluated"):
            await seeing.evaluate()
    finally:
        await blind.close()
        await seeing.close()


class ScriptedSampler(ToolCallReaderMixin):
    """A stand-in for the policy: says one line a turn."""

    name = "scripted"

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    async def sample(self, token_ids: list[int], *, max_tokens: int, seed: int | None = None) -> Sample:
        ids = chat_tokenizer(QWEN3).encode(next(self._lines) + "<|im_end|>", add_special_tokens=False)
        return Sample(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", policy_version=0)


async def run_agent(slot: AppWorldSlot, *lines: str) -> Trajectory:
    config = AgentConfig(prompt=Path("prompts/agent_starter.txt"))
    policy = TokenPolicy(ScriptedSampler(*lines), ChatTokenizer(chat_tokenizer(QWEN3), thinking=False), config)
    agent = CodeAgent(policy, config, agent_template(config.prompt, ""))
    request = RolloutRequest(task_id=slot.task.task_id, group="step0/x", rollout=2, attempt=0, seed=1)
    return await agent.run(slot, request)


async def test_an_agent_that_ends_its_own_world_has_failed(slot: AppWorldSlot, tasks: Tasks) -> None:
    task_id = tasks.next()
    await slot.open(task_id)
    kill = "json.codecs.builtins.__import__('posix')._exit(9)"
    trajectory = await run_agent(slot, "<code>print(5)</code>", f"<code>{kill}</code>")
    assert trajectory.ended is EpisodeEnd.CRASHED
    assert trajectory.task_id == task_id
    assert trajectory.error is not None
    assert "the task's process died (status 9)" in trajectory.error
    assert [turn.observation for turn in trajectory.turns] == ["5\n", None]
    evaluation = (await evaluate(slot, trajectory)).evaluation
    assert not evaluation.success
    assert evaluation.run == 2
    assert evaluation.ended is EpisodeEnd.CRASHED
    assert "crashed" in evaluation.failures[0]
    with pytest.raises(EnvironmentCrashed, match="the server has ended"):
        await slot.act("print(1)")
    await slot.close()
    await check_next_task_runs_clean(slot, tasks)


async def test_an_agent_that_finishes_is_evaluated(slot: AppWorldSlot, tasks: Tasks) -> None:
    task_id = tasks.next()
    await slot.open(task_id)
    cells = [f"<code>{cell}</code>" for cell in tasks.solution(task_id)]
    trajectory = await run_agent(slot, *cells, "Done.")
    assert trajectory.ended is EpisodeEnd.FINISHED
    evaluation = (await evaluate(slot, trajectory)).evaluation
    assert evaluation.success
    assert evaluation.turns == len(cells) + 1


async def test_a_dead_server_is_replaced(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    outermost, *inner = processes_of(slot)
    for process in (outermost, *inner):
        # The inner ones end with the outermost.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    with pytest.raises(EnvironmentCrashed):
        await slot.act("print(1)")
    assert slot.pid is None
    await check_next_task_runs_clean(slot, tasks)


async def test_a_dead_template_is_replaced(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    template = template_of(slot)
    template.kill()
    assert psutil.wait_procs([template], timeout=600)[1] == []
    await slot.close()
    await check_next_task_runs_clean(slot, tasks)


async def test_a_cancelled_cell_ends_its_server(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    processes = processes_of(slot)
    cell = asyncio.ensure_future(slot.act("while True: pass"))
    await asyncio.sleep(0.3)
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    assert psutil.wait_procs(processes, timeout=600)[1] == []
    await check_next_task_runs_clean(slot, tasks)


async def test_nothing_of_a_task_runs_during_the_next_one_or_the_evaluation(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    first = processes_of(slot)
    await slot.open(tasks.next())
    second = processes_of(slot)
    assert not any(process.is_running() for process in first)
    await slot.evaluate()
    assert not any(process.is_running() for process in second)


async def test_slots_share_what_is_loaded_and_nothing_else(slot: AppWorldSlot, root: Path, tasks: Tasks) -> None:
    others = [AppWorldSlot(EnvironmentConfig(), root, load_ground_truth=sees, name="other") for sees in (True, False)]
    await asyncio.gather(*(one.open(tasks.next()) for one in (slot, *others)))
    template = template_of(slot)
    assert [template_of(other) for other in others] == [template, template]
    # What one writes or kills is not the others' business.
    output = await attack(others[0], "posix.close(posix.open(posix.environ[b'HOME'] + b'/mine', 66))", "posix._exit(1)")
    assert "CRASHED" in output
    found = await attack(slot, "print(str(posix.listdir(posix.environ[b'HOME'].decode())))")
    assert "mine" not in found
    verdicts = await asyncio.gather(play(slot, tasks), play(others[0], tasks))
    assert all(verdict.success for verdict in verdicts)
    processes = [*processes_of(others[0]), *processes_of(others[1])]
    assert len(processes) >= 3
    await asyncio.gather(*(other.close() for other in others))
    assert psutil.wait_procs(processes, timeout=600)[1] == []
    assert template.is_running()
    assert (await play(slot, tasks)).success


async def test_nothing_outlives_a_killed_parent(sandbox_root: Path, tmp_path: Path) -> None:
    # Longer than the name of a Unix socket may be.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    program = f"""
import asyncio
from pathlib import Path
import psutil
from draco_ray.config.schema import EnvironmentConfig
from draco_ray.environments.appworld.data_root import load_split
from draco_ray.environments.appworld.slot import AppWorldSlot
from tests.support.worlds import PRELUDE, Tasks

async def hang(isolation):
    root = Path({str(sandbox_root)!r})
    slot = AppWorldSlot(EnvironmentConfig(isolation=isolation), root, load_ground_truth=False, name="orphan")
    await slot.open(Tasks(root).next())
    await slot.act(PRELUDE)
    await slot.act("for number in range(1, 32): number not in (9, 19) and signal.signal(number, signal.SIG_IGN)")
    print("ready", flush=True)
    await slot.act("while True:\\n    try:\\n        while True: pass\\n    except BaseException: pass")

async def main():
    await asyncio.gather(hang("auto"), hang("rlimits"))

asyncio.run(main())
"""
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        assert [parent.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert len(processes) >= 6
        assert len(list(folder.glob("*/*/*/stderr"))) == 2
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert psutil.wait_procs(processes, timeout=600)[1] == []
    while list(folder.iterdir()):  # noqa: ASYNC110 - the test's own time limit ends this
        await asyncio.sleep(0.1)


async def test_no_port_is_opened(slot: AppWorldSlot, tasks: Tasks) -> None:
    await slot.open(tasks.next())
    await slot.act("print(1)")
    for process in processes_of(slot):
        assert process.net_connections("inet") == []
