"""The attribution bench: what is planted, and what it says of judges whose ability is known."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from draco_ray.cli import main
from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import ConfigError, WorldError
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.judge import Judge
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.attribution.bench import JudgedRollout, judge_groups
from draco_ray.lab.analysis.attribution.measure import cited_steps, measures
from draco_ray.lab.analysis.attribution.plant import (
    BENIGN,
    IDLE_CELLS,
    MISLEADING,
    REFERENCE,
    PlantedRollout,
    choose,
    hard_plan,
    plan_planted_group,
    planted_groups,
    select_confirmed,
)
from draco_ray.lab.analysis.attribution.rubric import faults_of, known_rubric
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.sandbox.judge_server import JudgeServer
from draco_ray.sandbox.rule_judge.answering import answer
from draco_ray.sandbox.rule_judge.noise import Noise
from draco_ray.sandbox.world.scripts import FATAL, Fault, families
from tests.support.rule_judge_runs import REFUSED, instruction, output_of

FAMILIES = ("count_library_songs", "like_playlist_songs")


class Answers(RuleCompleter):
    """A judge of known ability, from the prompt's numbers of criteria and steps alone."""

    def __init__(self, score: int, step: str, broken: bool = False) -> None:
        super().__init__()
        self.score, self.step, self.broken = score, step, broken

    async def __call__(self, request: Request) -> Completion:
        prompt = request.messages[0].content
        completion = await super().__call__(request)
        if self.broken:
            return replace(completion, text="no")
        entries = json.loads(completion.text)["entries"]
        last = max(map(int, re.findall(r"^### Step (\d+)", prompt, re.MULTILINE)), default=1)
        for entry in entries:
            if "score" in entry:
                entry["score"] = self.score
            else:
                entry["verdict"] = "PASS" if self.score == 1 else "FAIL"
                entry["relevant_steps"] = [last if self.step == "last" else 1]
        return replace(completion, text=json.dumps(entries))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    for family in FAMILIES:
        folder = root / "data" / "tasks" / f"{family}_1"
        folder.mkdir(parents=True)
        person = {"first_name": "Ada", "last_name": "B", "email": "a@b.c", "phone_number": "1"}
        specs = {"instruction": instruction(family), "supervisor": person}
        (folder / "specs.json").write_text(json.dumps(specs))
    return root


def groups() -> list[list[PlantedRollout]]:
    """As planned, with outputs such as the engine gives, and success as it should be."""
    return [
        [
            replace(
                rollout,
                outputs=tuple(map(output_of, rollout.cells)),
                success=rollout.fault not in FATAL,
            )
            for rollout in plan_planted_group(f"{family}_1", family)
        ]
        for family in FAMILIES
    ]


async def judged(complete: RuleCompleter, world: Path) -> list[JudgedRollout]:
    judge = Judge(complete, load_prompts(Path("prompts/judge")), JudgeConfig(reasks=0))
    return await judge_groups(judge, groups(), world)


def values(rollouts: list[JudgedRollout], scope: str = "all") -> dict[str, dict[str, float]]:
    return {row["measure"]: row for row in measures(rollouts, "some").to_pylist() if row["scope"] == scope}


def test_a_group_is_the_reference_a_benign_mutation_and_every_fault() -> None:
    group = {rollout.kind: rollout for rollout in plan_planted_group("t_1", "count_library_songs")}
    assert set(group) == {REFERENCE, BENIGN, *(fault.value for fault in Fault)}
    assert group[REFERENCE].planted == ()
    assert group["first_page_only"].planted == (4,)
    assert group["wrong_filter"].planted == (5,)
    assert group["no_completion"].planted == (6,)
    assert group["repeat_failing_call"].planted == (4, 5)
    assert group["continue_after_completion"].planted == (7,)
    assert group[BENIGN].fault is None
    assert "records" in "".join(group[BENIGN].cells)


def truth(kind: str, outputs: Callable[[str], str] = output_of) -> dict[Fault, int]:
    """Known verdicts on a rollout of the plan, by the fault that the criterion is about."""
    (rollout,) = [rollout for rollout in plan_planted_group("t_1", "count_library_songs") if rollout.kind == kind]
    executed = replace(rollout, outputs=tuple(map(outputs, rollout.cells)))
    return dict(zip(executed.rubric, executed.truth_K.tolist(), strict=True))


def test_the_right_verdicts_are_known_except_where_a_fault_leaves_them_open() -> None:
    faults = faults_of(families()["count_library_songs"])
    titles = [criterion.title for criterion in known_rubric(faults, "Count.")]
    assert len(titles) == len(set(titles)) == 7
    good = dict.fromkeys(faults, 1)
    assert truth(REFERENCE) == truth(BENIGN) == good
    for fault in Fault:
        left_open = {Fault.FIRST_PAGE_ONLY: 0, Fault.WRONG_FILTER: 0} if fault is Fault.WRONG_SOURCE else {}
        assert truth(fault.value) == good | {fault: -1} | left_open


def test_a_fault_that_raises_later_violates_what_the_execution_shows() -> None:
    def misses_the_field(cell: str) -> str:
        # The other list has no such field: no answer comes of it, and none can be handed in.
        return REFUSED if "answer" in cell else output_of(cell)

    known = truth("wrong_source", misses_the_field)
    assert {fault for fault, verdict in known.items() if verdict == -1} == {
        Fault.WRONG_SOURCE,
        Fault.REPEAT_FAILING_CALL,
        Fault.NO_COMPLETION,
    }
    known = truth("first_page_only", lambda cell: REFUSED if "# Count" in cell else output_of(cell))
    # It is closed all the same: after what work?
    assert (known[Fault.REPEAT_FAILING_CALL], known[Fault.NO_COMPLETION]) == (-1, 0)


@pytest.mark.parametrize("family", sorted(families()))
def test_every_fault_of_every_family_leaves_a_mark(family: str) -> None:
    for rollout in plan_planted_group("t_1", family):
        assert bool(rollout.planted) or rollout.fault is None, rollout.kind
    assert set(faults_of(families()[family])) == families()[family].faults


@pytest.mark.parametrize("family", sorted(families()))
def test_a_hard_group_marks_faults_and_not_what_only_looks_wrong(family: str) -> None:
    group = {rollout.kind: rollout for rollout in hard_plan("t_1", family)}
    assert [rollout.scope for rollout in group.values()] == [
        *(REFERENCE, MISLEADING, "one fault", "two faults", "two faults", "two faults", "late fault")
    ]
    assert group[REFERENCE].planted == group[MISLEADING].planted == ()
    (late,) = [rollout for rollout in group.values() if rollout.scope == "late fault"]
    assert late.cells[late.planted[0] :][: len(IDLE_CELLS)] == IDLE_CELLS
    for rollout in group.values():
        assert bool(rollout.planted) is bool(rollout.faults)


async def test_of_a_hard_group_the_judge_writes_the_rubric(world: Path) -> None:
    group = [
        replace(each, outputs=tuple(map(output_of, each.cells)), success=not each.faults & FATAL)
        for each in hard_plan("count_library_songs_1", "count_library_songs")
    ]
    judge = Judge(RuleCompleter(), load_prompts(Path("prompts/judge")), JudgeConfig(reasks=0))
    found = await judge_groups(judge, [group], world)
    rows = {(row["scope"], row["measure"]): row for row in measures(found, "some").to_pylist()}
    assert {scope for scope, _ in rows} == {"all", "one fault", "late fault", "two faults"}
    assert rows["two faults", "citation_precision"]["observations"] == 3
    assert ("all", "kappa") not in rows, "the right verdicts on a judge's own criteria are not known"


async def test_the_rule_judge_finds_what_was_planted(world: Path) -> None:
    found = values(await judged(RuleCompleter(), world))
    assert found["kappa"]["value"] == 1.0
    assert 0.5 < found["accuracy"]["chance"] < 1.0
    assert found["false_blame"]["value"] == 0.0
    for name in (
        "citation_precision",
        "citation_recall",
        "hit_at_1",
        "first_error",
        "blame_auroc",
        "push_share",
    ):
        assert found[name]["value"] > 0.9 > found[name]["chance"], name
    # What step credit adds to plain GRPO, which spreads the push over tokens.
    assert found["grpo_share"]["value"] < 0.5 < found["push_share"]["value"]
    assert found["grpo_share"]["observations"] == found["push_share"]["observations"]


async def test_losers_are_those_pushed_away_not_all_that_have_a_fault(world: Path) -> None:
    rollouts = await judged(RuleCompleter(), world)
    before = values(rollouts)
    index = next(index for index, rollout in enumerate(rollouts) if rollout.planted.fault is not None)
    share = rollouts[index].share
    assert share is not None
    rollouts[index] = replace(rollouts[index], share=replace(share, advantage=-share.advantage))
    after = values(rollouts)
    assert after["blame_auroc"]["observations"] == before["blame_auroc"]["observations"]
    for name in ("push_share", "grpo_share"):
        assert after[name]["observations"] == before[name]["observations"] - 1, name


async def test_a_judge_that_passes_everything_is_accurate_and_no_better_than_chance(world: Path) -> None:
    found = values(await judged(Answers(1, "last"), world))
    assert found["accuracy"]["value"] == found["accuracy"]["chance"] > 0.8
    assert (found["kappa"]["value"], found["balanced_accuracy"]["value"]) == (0.0, 0.5)
    assert (found["false_pass"]["value"], found["citation_recall"]["value"]) == (1.0, 0.0)
    # All qualities are alike, or nobody is pushed away: chance, and nothing to observe.
    assert found["hit_at_1"]["value"] == pytest.approx(found["hit_at_1"]["chance"])
    assert found["blame_auroc"]["value"] == 0.5
    assert "push_share" not in found
    assert "citation_precision" not in found


async def test_a_judge_that_blames_the_last_step_is_as_good_as_that_rule(world: Path) -> None:
    found = values(await judged(Answers(-1, "last"), world))
    assert found["false_fail"]["value"] == found["false_blame"]["value"] == 1.0
    for name in ("citation_precision", "citation_recall", "first_error"):
        assert found[name]["value"] == pytest.approx(found[name]["last_step"]), name


async def test_rules_without_a_judge_stand_beside_it(world: Path) -> None:
    rollouts = await judged(RuleCompleter(), world)
    faulty = [rollout for rollout in rollouts if rollout.planted.fault is not None and rollout.planted.planted]
    hits: dict[str, list[bool]] = {"last_step": [], "first_failed": []}
    for rollout in faulty:
        errors = [
            step for step, output in enumerate(rollout.planted.outputs, 1) if output.startswith("Execution failed")
        ]
        hits["last_step"].append(rollout.steps in rollout.planted.planted)
        hits["first_failed"].append(min(errors, default=rollout.steps) in rollout.planted.planted)
    assert hits["last_step"] != hits["first_failed"]
    found = values(rollouts)
    for rule, each in hits.items():
        for measure in ("hit_at_1", "citation_precision", "push_share"):
            # Every fault is found, so that all of them are observed.
            row = found[measure]
            if row["observations"] == len(faulty):
                assert row[rule] == pytest.approx(np.mean(each)), (measure, rule)
    assert found["hit_at_1"]["observations"] == len(faulty)


async def test_step_credit_is_worth_less_the_more_citations_are_wrong(world: Path) -> None:
    shares = []
    for wrong in (0.0, 0.5, 1.0):
        found = values(await judged(RuleCompleter(Noise(wrong_step=wrong).blur(answer)), world))
        shares.append(found["push_share"]["value"])
        assert found["kappa"]["value"] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9 > 0.5 > shares[2]


async def test_a_judge_that_cannot_answer_counts_as_wrong_not_as_absent(world: Path) -> None:
    rollouts = await judged(Answers(1, "last", broken=True), world)
    found = values(rollouts)
    assert (found["unanswered"]["value"], found["accuracy"]["value"]) == (1.0, 0.0)
    assert found["kappa"]["value"] is None
    assert found["citation_recall"]["value"] == 0.0
    assert all(rollout.error for rollout in rollouts)


async def test_measures_by_fault_are_of_that_fault_alone(world: Path) -> None:
    rollouts = await judged(RuleCompleter(), world)
    assert values(rollouts, "no_completion")["citation_recall"]["observations"] == 2
    about = ("count_library_songs", "wrong_filter")
    (one,) = [each for each in rollouts if (each.planted.family, each.planted.kind) == about]
    assert one.share is not None
    assert one.verdict_K is not None
    assert (one.planted.planted, cited_steps(one), one.truth_K[2], one.verdict_K[2]) == ((5,), {5}, -1, -1)
    assert np.argmin(one.share.quality_M) == 4


def test_a_rollout_is_kept_only_if_the_tests_say_of_it_what_they_should() -> None:
    (group, _) = groups()
    assert select_confirmed(group) == group
    # A fatal fault that the tests do not see, a harmless one that breaks them, a rewording that does.
    for index, rollout in enumerate(group[1:], 1):
        other = [*group[:index], replace(rollout, success=not rollout.success), *group[index + 1 :]]
        assert select_confirmed(other) == [*group[:index], *group[index + 1 :]], rollout.kind
    # The fault undone does not succeed: the fault is not why it fails.
    assert select_confirmed([replace(group[0], success=False), *group[1:]]) == []


def test_families_take_turns() -> None:
    entries = {f"{name}_{n}": {"family": name[0], "split": "dev"} for name in ("ax", "ay", "bx") for n in (1, 2)}
    assert choose(entries | {"cx_1": {"family": "c", "split": "train"}}, "dev", 3) == ["ax_1", "bx_1", "ax_2"]


def test_a_folder_that_is_no_sandbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="draco sandbox build"):
        planted_groups(tmp_path, "dev", 1, 1, tmp_path / "rollouts.json")


@pytest.fixture(scope="module")
def benched(sandbox_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the bench has written once AppWorld has played a task's group and the rule judge has judged it."""
    out = tmp_path_factory.mktemp("benched")
    bench(out, sandbox_root, "rules")
    return out


def bench(out: Path, world: Path, *judge: str) -> None:
    words = ["attribution-bench", "--world", str(world), "--split", "dev", "--tasks", "1", "--processes", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--out", str(out), "--judge", *judge])


@pytest.mark.slow
def test_appworld_bears_the_plan_out_and_what_it_played_is_kept(
    sandbox_root: Path, benched: Path, tmp_path: Path
) -> None:
    kept = Path(shutil.copy(benched / "rollouts.json", tmp_path))
    (group,) = planted_groups(sandbox_root, "dev", 1, 1, kept)
    family = families()[group[0].family]
    assert [rollout.kind for rollout in group] == [REFERENCE, BENIGN, *faults_of(family)]
    for rollout in group:
        assert rollout.success is (rollout.fault not in FATAL), rollout.kind
        assert len(rollout.outputs) == len(rollout.cells)
    # What is kept is read, not played again: a changed file shows.
    kept.write_text(kept.read_text().replace('"success":true', '"success":false', 1))
    assert planted_groups(sandbox_root, "dev", 1, 1, kept) == []
    with pytest.raises(ConfigError, match="--split 'tests'"):
        planted_groups(sandbox_root, "tests", 1, 1, kept)


@pytest.mark.slow
def test_a_judge_behind_litellm_is_measured_on_the_same_rollouts(sandbox_root: Path, benched: Path) -> None:
    played = (benched / "rollouts.json").read_bytes()
    with JudgeServer() as server:
        bench(benched, sandbox_root, "openai/rule-judge", "--api-base", server.base_url)
    assert (benched / "rollouts.json").read_bytes() == played
    tables = [pq.read_table(benched / name / "measures.parquet") for name in ("rules", "openai_rule-judge")]
    assert tables[0].drop_columns(["judge"]).equals(tables[1].drop_columns(["judge"]))
    assert tables[0].num_rows > 50
