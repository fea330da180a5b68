"""The store of verdicts: what judging writes and estimators read, in several processes."""

from __future__ import annotations

import asyncio
import pickle
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draco_ray.adapters.credit import ArrivingGroup
from draco_ray.adapters.per_token_advantages import token_advantages
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
    """Answers a group at once, after the first ``failures`` calls, and remembers what it was asked."""

    def __init__(self, failures: int = 0) -> None:
        self.asked: list[dict[int, Any]] = []
        self.failures = failures

    async def __call__(self, records: dict[int, Any]) -> list[StepVerdict]:
        self.asked.append(records)
        await asyncio.sleep(0.01)
        if len(self.asked) <= self.failures:
            raise RuntimeError("no connection")
        return [GOOD if each == "good" else BAD for each in records.values()]


async def test_a_group_is_judged_once_and_whole_when_its_last_trajectory_arrives() -> None:
    judge = Judge()
    group = ArrivingGroup(3, judge)
    early = [asyncio.ensure_future(group.verdict(n, record)) for n, record in ((2, "good"), (0, "bad"))]
    await asyncio.sleep(0.05)
    assert not judge.asked
    assert await group.verdict(1, "good") == GOOD
    assert await asyncio.gather(*early) == [GOOD, BAD]
    assert judge.asked == [{0: "bad", 1: "good", 2: "good"}]


async def test_a_group_does_not_wait_for_a_trajectory_that_is_lost() -> None:
    judge = Judge()
    group = ArrivingGroup(3, judge)
    waiting = [asyncio.ensure_future(group.verdict(n, "good" if n else "bad")) for n in range(2)]
    await asyncio.sleep(0.05)
    assert not judge.asked
    # A trajectory that has arrived is not lost.
    group.settle(0)
    group.settle(2)
    assert await asyncio.gather(*waiting) == [BAD, GOOD]
    assert judge.asked == [{0: "bad", 1: "good"}]


async def test_a_judge_that_fails_is_asked_again_for_the_next_trajectory() -> None:
    judge = Judge(failures=1)
    group = ArrivingGroup(2, judge)
    found = await asyncio.gather(group.verdict(0, "bad"), group.verdict(1, "bad"), return_exceptions=True)
    assert found.count(BAD) == 1
    assert {type(each) for each in found} == {RuntimeError, StepVerdict}
    assert len(judge.asked) == 2


def test_a_store_of_an_earlier_version_is_read_and_written(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "v") as connection:
        connection.execute("CREATE TABLE verdicts (uid, grp, sample, record, verdict, PRIMARY KEY (uid, grp, sample))")
        connection.execute("INSERT INTO verdicts VALUES ('task', '7', '0', '', '{\"reward\": 0.5}')")
    store = VerdictStore(tmp_path / "v")
    store.put({key("1"): GOOD})
    assert store.get([key("0"), key("1")]) == [StepVerdict(reward=0.5), GOOD]
