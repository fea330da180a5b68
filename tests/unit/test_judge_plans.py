"""``judge.plan`` and the merged questions: they mean what the single ones mean, in fewer calls."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import DracoConfig, JudgeConfig
from draco_ray.errors import ConfigError, ReplyError
from draco_ray.judging.example import PROMPT, RUBRIC, example_trajectory
from draco_ray.judging.judge import CallContext, Judge
from draco_ray.judging.phases import Credit, Proposals, Score, Stage1, Stage2, Verdicts
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.analysis.judges import RuleCompleter
from draco_ray.records import Attribution, Verdict
from draco_ray.sandbox.world.scripts import families
from tests.support.rule_judge_runs import instruction, scripted_run, trajectory_of
from tests.unit.test_judging_judge import Script, completion, criteria, judge

WHERE = CallContext(group="g", task_id="t_1")
SETS = ("prompts/judge", "prompts/judge-cache-friendly")


def merged_reply(*verdicts: tuple[int, list[int]]) -> str:
    entries = [
        {"rubric_index": at, "evidence": "e", "justification": "j", "score": score, "relevant_steps": steps}
        for at, (score, steps) in enumerate(verdicts)
    ]
    return json.dumps({"entries": entries})


def test_a_plan_sets_only_keys_that_are_not_set() -> None:
    lean = load_config("sandbox", ["judge.plan=lean", "algorithm.rubric_visits=null"]).algorithm
    assert (lean.merge_proposals, lean.merge_verdicts, lean.rubric_visits) == (True, True, None)
    paper = load_config({"algorithm": {"credit_surviving_only": True}, "judge": {"plan": "paper"}})
    assert (paper.judge.stage1_across_epochs, paper.algorithm.skip_useless_credit_calls) == (False, False)
    assert paper.algorithm.credit_surviving_only
    assert load_config("sandbox", ["judge.plan=default"]) == load_config("sandbox")
    assert DracoConfig(judge=JudgeConfig(plan="lean")).algorithm.merge_verdicts


def test_a_plan_replaces_what_files_below_it_set(tmp_path: Path) -> None:
    file, child = tmp_path / "dumped.yaml", tmp_path / "child.yaml"
    file.write_text(dump_config(load_config("sandbox")))
    child.write_text("extends: ./dumped.yaml\njudge: {plan: paper}\n")
    for plan in ("default", "lean", "paper"):
        assert load_config(str(file), [f"judge.plan={plan}"]) == load_config("sandbox", [f"judge.plan={plan}"])
        assert load_config(str(child), [f"judge.plan={plan}"]) == load_config("sandbox", [f"judge.plan={plan}"])
    assert load_config(str(child)) == load_config("sandbox", ["judge.plan=paper"])
    assert not load_config(str(file), ["judge.plan=lean", "algorithm.merge_verdicts=false"]).algorithm.merge_verdicts
    file.write_text(dump_config(load_config("sandbox", ["judge.plan=lean", "algorithm.rubric_visits=3"])))
    assert load_config(str(file)).algorithm.rubric_visits == 3
    for section in ("judge", "algorithm"):
        with pytest.raises(ConfigError, match=f"config key {section}: this is a section"):
            load_config("sandbox", ["judge.plan=lean", f"{section}=3"])
    file.write_text("extends: sandbox\njudge: {plan: lean}\nalgorithm: {merge_verdicts: false}\n")
    assert not load_config(str(file), ["judge.plan=default"]).algorithm.merge_proposals


@pytest.mark.parametrize("prompts", SETS)
@pytest.mark.parametrize("family", sorted(families()))
async def test_the_rule_judge_answers_merged_questions_as_it_answers_single_ones(family: str, prompts: str) -> None:
    ours, task = Judge(RuleCompleter(), load_prompts(Path(prompts)), JudgeConfig(reasks=0)), instruction(family)
    runs = [scripted_run(family), *(scripted_run(family, fault) for fault in sorted(families()[family].faults))]
    played = [trajectory_of(run, task, n) for n, run in enumerate(runs)]
    stage1 = (await ours.ask(Stage1(played[0].prompt), WHERE)).value or ()
    proposed = await ours.ask(Proposals(played[0].prompt, stage1, played), WHERE)
    single = [await ours.ask(Stage2(each, stage1), WHERE) for each in played]
    assert proposed.value is not None
    assert {each.title for each in proposed.value} == {each.title for one in single for each in one.value or ()}
    rubric = [*stage1, *proposed.value]
    for each in played:
        scores = await ours.ask(Score(each, rubric), WHERE)
        credit = await ours.ask(Credit(each, rubric, scores.value or ()), WHERE)
        merged = await ours.ask(Verdicts(each, rubric), WHERE)
        assert merged.error is None
        assert [score.verdict for score in merged.value or ()] == [score.verdict for score in scores.value or ()]
        found = Attribution.of_scores(merged.value or ())
        assert [(one.verdict, one.steps) for one in found] == [(one.verdict, one.steps) for one in credit.value or ()]


async def test_a_merged_verdict_must_cite_a_step_that_exists() -> None:
    count = len(RUBRIC)
    good = merged_reply(*[(1, [2])] * count)
    for bad, said in (((-1, []), "must cite at least one step"), ((1, [7]), "step 7 does not exist")):
        script = Script(completion(merged_reply(bad, *[(1, [2])] * (count - 1))), completion(good))
        judged = await judge(script).ask(Verdicts(example_trajectory(), RUBRIC), WHERE)
        assert judged.ok
        assert said in (judged.calls[0].error or "")
    question = Verdicts(example_trajectory(), RUBRIC)
    parsed = question.parse(merged_reply((-1, []), *[(0, [1])] * (count - 1)), JudgeConfig(), last=True)
    assert [score.steps for score in parsed.value] == [()] * count
    assert parsed.value[0].verdict is Verdict.FAIL
    with pytest.raises(ReplyError, match="relevant_steps"):
        question.parse(json.dumps({"entries": [{"rubric_index": 0, "score": 1}] * count}), JudgeConfig(), last=True)


async def test_proposals_that_do_not_fit_are_asked_for_in_halves() -> None:
    class Asked:
        def __init__(self) -> None:
            self.prompts: list[str] = []

        async def __call__(self, request: Any) -> Any:
            self.prompts.append(request.messages[0].content)
            return completion(criteria(f"Of call {len(self.prompts)}"))

        async def forget(self, request: Any) -> None: ...

        async def check(self) -> None: ...

    question = Proposals(PROMPT, RUBRIC[:1], [example_trajectory(each) for each in range(4)])
    whole = len(question.prompt(load_prompts(Path(SETS[0]))))
    room = whole // 3 - 50
    for tokens, shown in ((10**6, [[0, 1, 2, 3]]), (room + 2048, [[0, 1], [2, 3]])):
        complete: Any = Asked()
        settings: dict[str, Any] = {"model": "openai/no-such", "reasks": 0, "max_tokens": 2048}
        judged = await judge(complete, context_tokens=tokens, **settings).ask(question, WHERE)
        seen = [[int(each) for each in re.findall(r'<rollout index="(\d+)"', each)] for each in complete.prompts]
        assert seen == shown
        assert [each.title for each in judged.value or ()] == [f"Of call {n + 1}" for n in range(len(shown))]
        assert judged.left_out == 0
    assert "Of call 1" in complete.prompts[1]


def test_a_rubric_that_is_extended_keeps_within_the_limit() -> None:
    carried = [RUBRIC[0].__class__(title=f"C{n}", description="d", evaluator_instruction="i") for n in range(3)]
    question = Proposals(PROMPT, carried, [example_trajectory()])
    text = json.dumps([json.loads(criteria(f"New {n}"))[0] for n in range(3)])
    parsed = question.parse(text, JudgeConfig(max_union_criteria=4), last=True)
    assert [each.title for each in parsed.value] == ["New 0"]
