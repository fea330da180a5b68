"""Replaying recorded verdicts: the record is recomputed exactly, and each variant differs where its rule says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from draco_ray.algorithm.equations import STD_EPSILON
from draco_ray.algorithm.rules import AdvantageRule, CreditSkipReason, group_advantages
from draco_ray.cli import main
from draco_ray.lab.analysis.judged_groups import RecordedGroup, recorded_groups
from draco_ray.lab.analysis.rules import apply_rule, replay_rules
from draco_ray.lab.analysis.tables import tidy
from draco_ray.records import Attribution, CreditFallback, Criterion, ScoredCriterion, Verdict
from draco_ray.runs import rows
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.store import RunStore

PASS, FAIL = Verdict.PASS, Verdict.FAIL
VERDICTS = np.array([[1, 1, -1], [1, -1, -1], [1, 1, -1], [1, 0, -1]])
CITED: tuple[tuple[Attribution, ...] | None, ...] = (
    (
        Attribution(criterion=1, verdict=PASS, steps=(1,)),
        Attribution(criterion=2, verdict=FAIL, steps=(2, 3)),
    ),
    # The credit call overrules the scoring call on criterion 1.
    (
        Attribution(criterion=1, verdict=PASS, steps=(1,)),
        Attribution(criterion=2, verdict=FAIL, steps=()),
    ),
    None,
    (Attribution(criterion=2, verdict=FAIL, steps=(2,)),),
)
TOKENS = [np.array([2, 4, 6])] * 4


def write(
    store: RunStore, step: int, task: str, uncalled: tuple[int, ...] = (), std_epsilon: float = STD_EPSILON
) -> None:
    share = group_advantages(
        f"step{step}/{task}", VERDICTS, CITED, TOKENS, range(4), rule=AdvantageRule(), std_epsilon=std_epsilon
    )
    rubric = [Criterion(title=title, description="d", evaluator_instruction="i") for title in ("All", "Some", "Nobody")]
    store.write("criteria", step, task, rows.criterion_rows(step, task, rubric, share))
    store.write("advantages", step, task, rows.advantage_rows(step, task, share, dict.fromkeys(range(4), (2, 4, 6))))
    for rollout in range(4):
        scores = [ScoredCriterion(verdict=Verdict(int(verdict))) for verdict in VERDICTS[rollout]]
        store.write("verdicts", step, f"{task}-{rollout}", rows.verdict_rows(step, task, rollout, scores))
        cited = rows.citation_rows(step, task, rollout, () if rollout in uncalled else CITED[rollout] or ())
        store.write("citations", step, f"{task}-{rollout}", cited)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    store = RunStore(RunDirectory.create(tmp_path_factory.mktemp("replay") / "judged", "seed: 0\n"))
    for step in (1, 2):
        write(store, step, "task_1")
    return store.directory


@pytest.fixture
def group(run: RunDirectory) -> RecordedGroup:
    return next(recorded_groups(run))


def test_a_group_reads_back_as_it_was(group: RecordedGroup) -> None:
    assert group.name == "step1/task_1"
    assert group.titles == ("All", "Some", "Nobody")
    assert (group.verdict_GK == VERDICTS).all()
    assert group.attributions == CITED
    assert [tokens.tolist() for tokens in group.tokens_GM] == [[2, 4, 6]] * 4


def test_the_method_itself_recomputes_the_record_exactly(run: RunDirectory) -> None:
    table = replay_rules(run, ["draco"]).to_pylist()
    assert [row["training_step"] for row in table] == [1, 2]
    for row in table:
        assert (row["reward_shift"], row["advantage_shift"], row["sign_flips"], row["push_moved"]) == (0, 0, 0, 0)
        assert (row["criteria"], row["surviving"], row["groups_with_signal"]) == (3, 2, 1)


def test_a_runs_own_epsilon_is_that_of_the_rules(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "smoothed", "algorithm: {std_epsilon: 0.5}\n"))
    write(store, 1, "task_1", std_epsilon=0.5)
    shifts = {row["rule"]: row["advantage_shift"] for row in tidy("rules", [store.directory]).to_pylist()}
    assert shifts["draco"] == 0.0 < shifts["no_std"]


def test_without_dropout_a_criterion_all_pass_lifts_every_reward(group: RecordedGroup) -> None:
    rewards = [share.reward for share in apply_rule(group, "no_dropout").rollouts]
    assert rewards == pytest.approx([1 / 3, -1 / 3, 1 / 3, 0.0])
    assert group.reward_G.tolist() == [0.0, -1.0, 0.0, -1.0]


def test_a_criterion_all_fail_survives_unless_both_verdicts_are_asked_for(group: RecordedGroup) -> None:
    mixed = apply_rule(group, "mixed_only")
    assert mixed.surviving_K.tolist() == [False, True, False]
    assert [share.reward for share in mixed.rollouts] == [1.0, -1.0, 1.0, 0.0]


def test_no_std_keeps_the_scale_of_rewards(group: RecordedGroup) -> None:
    shares = apply_rule(group, "no_std").rollouts
    assert [share.advantage for share in shares] == [0.5, -0.5, 0.5, -0.5]


def test_no_credit_pushes_every_step_alike(group: RecordedGroup) -> None:
    for share in apply_rule(group, "grpo").rollouts:
        assert share.step_advantage_M.tolist() == [share.advantage] * 3
        assert share.fallback is CreditFallback.CREDIT_OFF


def test_the_credit_calls_overruling_can_be_undone(group: RecordedGroup) -> None:
    overruled = apply_rule(group, "draco").rollouts[1]
    scored = apply_rule(group, "score_verdicts").rollouts[1]
    assert overruled.quality_M.tolist() == [1.0, 1.0, 1.0]
    assert scored.quality_M.tolist() == [0.0, 0.0, 0.0]


def test_unanimous_rollouts_credited_without_a_call_are_recomputed(tmp_path: Path) -> None:
    store = RunStore(RunDirectory.create(tmp_path / "skipped", "seed: 0\n"))
    write(store, 1, "task_1", uncalled=(3,))
    recorded = next(recorded_groups(store.directory))
    assert recorded.attributions[3] is CreditSkipReason.UNANIMOUS
    (row,) = replay_rules(store.directory, ["draco"]).to_pylist()
    assert (row["push_moved"], row["no_citation"]) == (0.0, 0)


def test_the_command_prints_and_writes_the_tables(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.path), "--rule", "draco", "--rule", "grpo", "--out", str(folder)])
    assert ended.value.code == 0
    assert "grpo" in capsys.readouterr().out
    variants = pq.read_table(folder / "rules.parquet").to_pylist()
    assert [row["rule"] for row in variants] == ["draco", "grpo"] * 2
    assert {path.suffix for path in folder.iterdir()} == {".parquet", ".csv"}
    assert not (run.path / "replay").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rule", "bigger"], "unknown; expected draco, draco_calibrated, grpo"),
        (["--step", "9"], "no training step 9"),
        (["--phase", "score"], "--phase: no effect without --judge MODEL"),
        (["--judge", "rules", "--phase", "union"], "add --pairing"),
        (["--judge", "rules"], "no archived score or credit call"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    run: RunDirectory, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run.path), *options])
    assert ended.value.code == 2
    message = capsys.readouterr().err.strip()
    assert expected in message
    assert "\n" not in message
