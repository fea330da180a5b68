"""The store of verdicts: what judging writes and estimators read, in several processes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.adapters import verdicts
from draco_ray.adapters.tokens import token_advantages
from draco_ray.adapters.verdicts import MissingVerdict, StepVerdict, TrajectoryKey, VerdictStore, digest
from draco_ray.errors import ConfigError

MASK = [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1]
ACTED = (True, True, False)
GOOD = StepVerdict(reward=1.0, quality=(1.0, 0.25), acted=ACTED, tokens=(3, 4, 2))
BAD = StepVerdict(reward=-1.0, quality=(0.0, 1.0), acted=ACTED, tokens=(3, 4, 2))
FAILED = StepVerdict(reward=None, error="the judge did not answer")


def key(sample: str, uid: str = "task") -> TrajectoryKey:
    return TrajectoryKey(uid, "7", sample)


def test_a_shuffled_batch_gets_the_advantages_of_its_own_trajectories(tmp_path: Path) -> None:
    VerdictStore(tmp_path / "v.sqlite").put({key("0"): GOOD, key("1"): BAD, key("2"): FAILED})
    reader = VerdictStore(tmp_path / "v.sqlite")
    keys, advantages = [key("2"), key("1"), key("0")], [0.1, -0.7, 0.6]
    spread = reader.spread(keys, advantages, [MASK] * 3)
    assert spread.dtype == np.float32
    assert spread[2].tolist() == pytest.approx(token_advantages(0.6, GOOD.quality, ACTED, MASK).tolist())
    assert spread[1].tolist() == pytest.approx(token_advantages(-0.7, BAD.quality, ACTED, MASK).tolist())
    assert spread[0].tolist() == pytest.approx([0.1 * each for each in MASK])
    assert spread.sum(axis=1).tolist() == pytest.approx([0.9, -0.7 * 7 - 0.0, 0.6 * 7], rel=1e-5)
    assert reader.counts == {"spread": 2, "failed": 1}


def test_a_missing_verdict_is_an_error_or_uniform_and_counted(tmp_path: Path) -> None:
    strict, lenient = VerdictStore(tmp_path / "v"), VerdictStore(tmp_path / "v", missing="uniform")
    with pytest.raises(MissingVerdict, match=r"trajectory task/7/0: no verdict in .*missing=\"uniform\""):
        strict.spread([key("0")], [1.0], [MASK])
    assert lenient.spread([key("0")], [0.5], [MASK])[0].tolist() == [0.5 * each for each in MASK]
    strict.put({key("0"): GOOD})
    other = [[1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(MissingVerdict, match="of another trajectory"):
        strict.spread([key("0")], [1.0], other)
    assert lenient.spread([key("0")], [0.5], other)[0].tolist() == [0.5 * each for each in other[0]]
    assert lenient.counts == {"missing": 1, "stale": 1}
    # A row that the trainer masks asks for nothing.
    assert not strict.spread([key("none")], [1.0], [[0] * 4]).any()
    with pytest.raises(ValueError, match="1 keys, 2 advantages and 1 rows"):
        strict.spread([key("0")], [1.0, 2.0], [MASK])


def test_rows_without_citations_and_rows_that_were_cut_stay_uniform(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "v")
    store.put(
        {
            key("0"): StepVerdict(reward=0.5, quality=(None, None), acted=ACTED),
            key("1"): StepVerdict(reward=0.5, quality=(1.0, 0.0, 0.5), acted=(True, True, True, False)),
        }
    )
    assert store.spread([key("0"), key("1")], [1.0, 1.0], [MASK, MASK]).tolist() == [MASK, MASK]
    assert store.counts == {"uncited": 1, "cut": 1}


def test_rows_of_one_trajectory_share_its_advantage(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "v")
    parts = [StepVerdict(reward=1.0, quality=(1.0, 0.25), acted=ACTED, tokens=(3, 4, 2), first=n) for n in (0, 1)]
    store.put({key("0/0"): parts[0], key("0/1"): parts[1]})
    rows = [[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 1, 1]]
    spread = store.spread([key("0/0"), key("0/1")], [0.6, 0.6], rows)
    whole = token_advantages(0.6, GOOD.quality, ACTED, MASK)
    assert spread[np.array(rows) != 0].tolist() == pytest.approx(whole[np.array(MASK) != 0].tolist())


def test_what_another_process_has_written_is_found_and_a_later_verdict_replaces_it(tmp_path: Path) -> None:
    store = VerdictStore(tmp_path / "deep" / "v.sqlite")
    code = (
        "import sys\nfrom draco_ray.adapters.verdicts import *\n"
        "VerdictStore(sys.argv[1]).put({TrajectoryKey('task', '7', '0'): "
        "StepVerdict(reward=-1.0, quality=(0.0, 1.0), acted=(True, True, False), tokens=(3, 4, 2))})"
    )
    subprocess.run([sys.executable, "-c", code, str(store.path)], check=True)
    again = pickle.loads(pickle.dumps(store))
    assert again.get([key("0"), key("0", "other")]) == [BAD, None]
    again.put({key("0"): GOOD})
    assert store.get([key("0")]) == [GOOD]


def test_a_store_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="expected a writable file"):
        VerdictStore(tmp_path / "file" / "v")
    (tmp_path / "other").write_text("not a database, but long enough to be taken for one" * 40)
    with pytest.raises(ConfigError, match="verdict store"):
        VerdictStore(tmp_path / "other")
    with pytest.raises(ConfigError, match="expected 'error' or 'uniform'"):
        VerdictStore(tmp_path / "v", missing="zero")  # type: ignore[arg-type]
    assert digest([1, 2]) == digest([1, 2]) != digest([2, 1])


class Judge:
    """Answers a group at once, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    async def __call__(self, records: list[dict[str, Any]]) -> list[StepVerdict]:
        self.asked.append(records)
        await asyncio.sleep(0.05)
        return [GOOD if each["good"] else BAD for each in records]


async def test_a_group_that_is_split_over_workers_is_judged_once_and_whole(tmp_path: Path) -> None:
    judge = Judge()
    stores = [VerdictStore(tmp_path / "v") for _ in range(2)]
    found = await asyncio.gather(
        *(stores[n % 2].judge_in_group(key(str(n)), {"good": n < 2}, lambda: 4, judge, timeout=20.0) for n in range(4))
    )
    assert found == [GOOD, GOOD, BAD, BAD]
    assert judge.asked == [[{"good": True}, {"good": True}, {"good": False}, {"good": False}]]
    # A restarted worker with the same trajectory asks for nothing.
    assert await stores[0].judge_in_group(key("1"), {"good": True}, lambda: 4, judge) == GOOD
    assert len(judge.asked) == 1
    # The same names with other trajectories: a new group.
    again = [
        stores[0].judge_in_group(key(str(n)), {"good": n == 3, "new": 1}, lambda: 4, judge, timeout=20.0)
        for n in range(4)
    ]
    assert await asyncio.gather(*again) == [BAD, BAD, BAD, GOOD]


WORKER = """
import asyncio, sys
from draco_ray.adapters.verdicts import StepVerdict, TrajectoryKey, VerdictStore

async def judge(records):
    print("judged", *(each["n"] for each in records))
    return [StepVerdict(reward=float(each["n"])) for each in records]

async def main(path, *samples):
    store = VerdictStore(path)
    keys = [TrajectoryKey("task", "", each) for each in samples]
    waiting = [store.judge_in_group(key, {"n": int(key.sample)}, lambda: 4, judge, timeout=120.0) for key in keys]
    print(*(int(verdict.reward) for verdict in await asyncio.gather(*waiting)))

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_judge_their_common_group_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "v.sqlite")]
    workers = [
        subprocess.Popen([*command, *samples], stdout=subprocess.PIPE, text=True)
        for samples in (("0", "3"), ("1", "2"))
    ]
    printed = [worker.communicate()[0].splitlines() for worker in workers]
    assert [lines[-1] for lines in printed] == ["0 3", "1 2"]
    assert [line for lines in printed for line in lines[:-1]] == ["judged 0 1 2 3"]


async def test_a_group_that_stays_incomplete_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, judge = VerdictStore(tmp_path / "v"), Judge()
    with pytest.raises(MissingVerdict, match="group task: 1 of 2 trajectories"):
        await store.judge_in_group(key("0"), {"good": True}, lambda: 2, judge, timeout=0.3)
    # Its worker has gone: another trajectory does not make the group whole.
    monkeypatch.setattr(verdicts, "ALIVE_SECONDS", 0.0)
    with pytest.raises(MissingVerdict):
        await store.judge_in_group(key("1"), {"good": True}, lambda: 2, judge, timeout=0.3)
    assert not judge.asked


async def test_a_group_does_not_wait_for_a_trajectory_that_is_lost(tmp_path: Path) -> None:
    store, judge, sizes = VerdictStore(tmp_path / "v"), Judge(), [3]
    waiting = [
        asyncio.ensure_future(store.judge_in_group(key(str(n)), {"good": n < 1}, lambda: sizes[0], judge))
        for n in range(2)
    ]
    await asyncio.sleep(0.1)
    assert not judge.asked
    sizes[0] = 2
    assert await asyncio.gather(*waiting) == [GOOD, BAD]
    assert len(judge.asked) == 1


async def test_a_judge_that_fails_leaves_the_group_to_the_next_worker(tmp_path: Path) -> None:
    store, judge = VerdictStore(tmp_path / "v"), Judge()

    async def broken(records: list[dict[str, Any]]) -> list[StepVerdict]:
        raise RuntimeError("no connection")

    with pytest.raises(RuntimeError, match="no connection"):
        await store.judge_in_group(key("0"), {"good": True}, lambda: 1, broken)
    assert await store.judge_in_group(key("0"), {"good": True}, lambda: 1, judge) == GOOD
