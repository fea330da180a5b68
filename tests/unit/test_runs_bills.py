"""A reply that was paid for is on the books once: neither twice after a resume, nor lost with a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draco_ray.records import JudgeCall, Judged, OriginalCost
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import PaidCalls, RunStore
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.training.resume import rewind
from tests.support.small_run import TASKS, a_call

PAID = a_call("score", 1, TASKS[0], 0)


def replayed(call: JudgeCall, number: str) -> JudgeCall:
    """The same reply out of the durable cache, in a later process."""
    paid = OriginalCost(
        call_id=call.call_id,
        requests=call.requests,
        dollars=call.dollars,
        estimated_dollars=call.estimated_dollars,
        seconds=call.seconds,
        started_at=call.started_at,
        waited_seconds=call.waited_seconds,
    )
    return replace(call, call_id=number, requests=0, dollars=0.0, seconds=0.0, started_at=999.0, paid=paid)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(RunDirectory.create(tmp_path / "run", ""))


def test_what_a_kill_kept_from_the_archive_is_booked_by_its_first_replay_and_not_again(store: RunStore) -> None:
    calls = PaidCalls(store, "")
    (first,) = calls.rows(1, "a", [replayed(PAID, "again-1")])
    assert (first["call_id"], first["dollars"], first["requests"]) == (PAID.call_id, PAID.dollars, PAID.requests)
    store.write("judge_calls", 1, "a", [first])
    (second,) = calls.rows(2, "b", [replayed(PAID, "again-2")])
    assert (second["call_id"], second["dollars"], second["requests"]) == ("again-2", 0.0, 0)
    # Nor by a process that comes later still.
    (third,) = PaidCalls(store, "").rows(3, "c", [replayed(PAID, "again-3")])
    assert (third["call_id"], third["dollars"]) == ("again-3", 0.0)


def test_a_phase_asked_again_in_its_step_keeps_its_first_record(store: RunStore) -> None:
    calls = PaidCalls(store, "")
    store.write("judge_calls", 1, "a", calls.rows(1, "a", [PAID]))
    (row,) = PaidCalls(store, "").rows(1, "a", [replayed(PAID, "again")])
    assert (row["call_id"], row["dollars"]) == (PAID.call_id, PAID.dollars)


def test_what_another_run_paid_for_is_not_on_this_ones_books(store: RunStore) -> None:
    (row,) = PaidCalls(store, "this-run/").rows(1, "a", [replayed(PAID, "again")])
    assert (row["call_id"], row["dollars"]) == ("again", 0.0)


def test_what_a_repeated_step_no_longer_asks_was_paid_for(store: RunStore) -> None:
    """Of a run that went on with another configuration, or with rollouts that were played again."""
    store.write("judge_calls", 1, "a", PaidCalls(store, "").rows(1, "a", [PAID]))
    other = replace(PAID, call_id="other", prompt="of another rollout", reply="another")
    for _ in range(2):
        made = PaidCalls(store, "").rows(1, "a", [other])
        store.write("judge_calls", 1, "a", made)
        # The latest comes first, for whoever looks for the answer that was used.
        assert [row["call_id"] for row in made] == ["other", PAID.call_id]


def test_votes_with_equal_replies_are_on_the_books_once_each(store: RunStore) -> None:
    votes = [replace(PAID, call_id=f"vote-{number}", dollars=number) for number in (1.0, 2.0, 3.0)]
    store.write("judge_calls", 1, "a", PaidCalls(store, "").rows(1, "a", votes))
    for again in range(2):
        asked = [replayed(vote, f"again-{again}-{number}") for number, vote in enumerate(votes)]
        made = PaidCalls(store, "").rows(1, "a", asked)
        store.write("judge_calls", 1, "a", made)
        assert [row["dollars"] for row in made] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("reuse", [True, False])
def test_what_the_held_out_judge_cost_in_a_step_that_is_repeated_stays(store: RunStore, reuse: bool) -> None:
    actor = RunStoreActor(store.directory.path)
    actor.judged(1, TASKS[0], 0, "score", Judged(value=None, calls=(PAID,)))
    actor.heldout_calls(1, f"{TASKS[0]}-held_out-0", Judged(value=None, calls=(replace(PAID, call_id="held-out"),)))
    assert rewind(store.directory, reuse=reuse, learner="lora").step == 0
    for table in ("judge_calls", "heldout_calls"):
        assert store.directory.table(table, 1, ["dollars"]).column("dollars").to_pylist() == [PAID.dollars]


def test_an_interrupted_evaluation_that_is_judged_again_keeps_what_it_cost(store: RunStore) -> None:
    for call in (PAID, replayed(PAID, "again-1"), replayed(PAID, "again-2")):
        actor = RunStoreActor(store.directory.path)
        actor.heldout_calls(0, f"{TASKS[0]}-score-0", Judged(value=None, calls=(call,)))
        assert store.directory.table("heldout_calls", 0, ["dollars"]).column("dollars").to_pylist() == [PAID.dollars]
