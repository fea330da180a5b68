"""A judge phase is one file and one line: the page that says so is run, and what goes through the phases knows it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draco_ray.cli import main
from draco_ray.commands.import_prompts import import_prompts
from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.example import EXAMPLES, PROMPT, RUBRIC, SCORES, example_trajectory
from draco_ray.judging.judge import CallContext, Judge, phase_summary
from draco_ray.judging.phases import PHASES, Credit, Phase, Score, Stage1, Stage2, Union, phase_rank
from draco_ray.judging.pool import JudgeWorkerActor
from draco_ray.judging.prompts import load_prompts
from draco_ray.lab.runs.cost import cost_table, phase_costs
from draco_ray.pipeline import Group
from draco_ray.records import Attribution, Criterion, EpisodeEnd, Judged
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.rows import judged_rows
from draco_ray.runs.store_actor import RunStoreActor
from draco_ray.training.metrics import step_metrics

PAGE = Path("docs/extending/judge_phase.md")
WHERE = CallContext(group="step1/example_1", task_id="example_1", rollout=0)


@pytest.fixture
def summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's phase, listed as the page says, with its template in the prompt set at ``tmp_path / "set"``."""
    blocks = dict(re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    templates = re.findall(r"```\n(What did.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "summary_phase.py"
    file.write_text(blocks["python"])
    spec = importlib.util.spec_from_file_location("summary_phase", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["summary_phase"] = module
    spec.loader.exec_module(module)
    phase: Phase = module.Summary
    monkeypatch.setitem(PHASES, phase.name, phase)
    monkeypatch.setitem(EXAMPLES, phase.name, module.Summary(example_trajectory()))
    shutil.copytree("prompts/judge", tmp_path / "set")
    (tmp_path / "set" / phase.template).write_text(templates[0])
    yield phase
    del sys.modules["summary_phase"]


class Script:
    """Completes requests from a list."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.asked.append(request)
        return Completion(
            text=self.answers.pop(0),
            finish_reason="stop",
            model="scripted",
            input_tokens=10,
            cached_tokens=0,
            output_tokens=5,
            dollars=0.5,
            started_at=1.0,
            seconds=1.0,
            requests=1,
        )

    async def forget(self, request: Request) -> None:
        """Nothing is kept."""

    async def check(self) -> None:
        """It is there."""


async def test_the_pages_phase_is_asked_archived_counted_and_shown(
    summary: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = json.dumps([{"sentence": "It looked."}, {"sentence": "It left."}])
    script = Script(two, json.dumps([{"sentence": "It read one page only."}]))
    judge = Judge(script, load_prompts(tmp_path / "set"), JudgeConfig())
    judged = await judge.ask(summary(example_trajectory()), WHERE)
    assert judged.value == ("It read one page only.",)
    first, again = script.asked
    assert "(output of step 2)" in first.messages[0].content
    assert "2 entries, expected 1" in again.messages[-1].content
    assert first.schema is not None
    assert "sentence" in json.dumps(first.schema)
    assert [call.phase for call in judged.calls] == ["summary", "summary"]

    store = RunStoreActor(RunDirectory.create(tmp_path / "run", "setting: draco\n").path)
    store.judged(1, "example_1", 0, summary.name, judged)
    group = Group(step=1, index=0, task_id="example_1", prompt=PROMPT)
    group.phases.append(phase_summary(summary.name, WHERE, judged, 0.0))
    metrics = step_metrics(1, [group], 2)
    store.finish_step(1, metrics)
    run = RunDirectory.open(tmp_path / "run")
    assert run.table("judge_calls").column("phase").to_pylist() == ["summary", "summary"]
    assert metrics["judge"]["summary"]["requests"] == 2
    table = cost_table(phase_costs(run.table("judge_calls").to_pylist())).splitlines()
    assert len(table) == 3
    assert table[-2].split()[:2] == ["summary", "2"]

    with pytest.raises(SystemExit, match="0"):
        main(["prompts", "render", "summary", "--set", str(tmp_path / "set")])
    assert capsys.readouterr().out.startswith("What did the agent do?")


def test_a_prompt_set_without_the_new_template_is_refused_by_name(summary: Any, tmp_path: Path) -> None:
    (tmp_path / "set" / summary.template).unlink()
    with pytest.raises(Exception, match=re.escape("summary.txt cannot be read")):
        load_prompts(tmp_path / "set")
    source = tmp_path / "paper.tex"
    source.write_text("no listing")
    with pytest.raises(Exception, match=re.escape("summary.txt")):
        import_prompts(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["summary", " ", "SCORE"])
def test_an_unknown_phase_on_the_command_line_is_named_with_those_that_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prompts", "render", name])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "not a judge phase; expected one of stage1, stage2, proposals, union, score, verdicts, credit" in said


def test_the_examples_are_of_one_group_and_show_what_each_phase_is_given() -> None:
    rollout, other = example_trajectory(), example_trajectory(1)
    assert EXAMPLES["stage1"] == Stage1(PROMPT)
    stage2, score, credit, union = (EXAMPLES[name] for name in ("stage2", "score", "credit", "union"))
    assert isinstance(stage2, Stage2)
    assert stage2.existing == RUBRIC[:1]
    assert isinstance(union, Union)
    assert (union.messages, union.candidates) == (PROMPT, RUBRIC)
    assert [each.rollout for each in union.trajectories] == [rollout.rollout, other.rollout]
    assert isinstance(score, Score)
    assert isinstance(credit, Credit)
    assert score.rubric == credit.rubric == RUBRIC
    assert credit.scores == SCORES
    assert {each.identity for each in (stage2, score, credit, union)} == {rollout.group}


@pytest.mark.parametrize(
    ("rollout", "read", "count"),
    [
        (0, "songs = apis.spotify.show_song_library(page_index=0)", "5"),
        (1, "songs = [song for page in range(9) for song in apis.spotify.show_song_library(page_index=page)]", "17"),
        (2, "songs = apis.spotify.show_song_library(page_index=0)", "5"),
    ],
)
def test_the_examples_rollouts_are_whole_and_only_the_second_reads_all_pages(
    rollout: int, read: str, count: str
) -> None:
    played = example_trajectory(rollout)
    look, submit = f"{read}\nprint(len(songs))", "apis.supervisor.complete_task(answer=len(songs))"
    assert [(turn.text, turn.action, turn.observation) for turn in played.turns] == [
        (f"<think>Next, step 1.</think>\n<code>\n{look}\n</code>", look, count),
        (f"<think>Next, step 2.</think>\n<code>\n{submit}\n</code>", submit, "Execution successful."),
        ("Done.", None, None),
    ]
    # What was sampled is what the turns hold; the closing turn is no step, and one token stands behind each step.
    spoken = [range(turn.first_token, turn.last_token) for turn in played.turns]
    assert np.flatnonzero(played.sampled_T).tolist() == [token for turn in spoken for token in turn]
    assert {int(step): np.flatnonzero(played.step_T == step).tolist() for step in (0, 1)} == {
        step: list(spoken[step]) for step in (0, 1)
    }
    assert [turn.first_token for turn in played.turns] == [2, 4, 6]
    assert (played.tokens_M.tolist(), played.prompt_length) == ([1, 1], 2)
    assert (played.token_ids_T.tolist(), played.logprob_T.tolist()) == (list(range(7)), [0.0] * 7)
    assert (played.prompt, played.ended, played.name, played.group) == (
        PROMPT, EpisodeEnd.FINISHED, f"example_1/{rollout}", "step0/example_1",
    )  # fmt: skip
    assert (played.attempt, played.policy_version, played.started_at, played.ended_at) == (0, 0, 0.0, 1.0)


@pytest.mark.parametrize("phase", PHASES.values(), ids=list(PHASES))
def test_every_placeholder_is_filled_and_evidence_carries_the_code(phase: Phase) -> None:
    values = EXAMPLES[phase.name].values("c0de")
    assert values.keys() == phase.placeholders
    blocks = [str(value) for value in values.values() if str(value).startswith("[BEGIN EVIDENCE ")]
    assert blocks
    for block in blocks:
        assert "c0de]" in block
        assert "None]" not in block
        assert 'code="None"' not in block


def test_verdicts_and_citations_of_no_rollout_are_no_rows() -> None:
    attribution = Attribution(criterion=0, verdict=SCORES[0].verdict, steps=(1, 2))
    for phase, table, value, rows in (("score", "verdicts", SCORES, 2), ("credit", "citations", (attribution,), 2)):
        assert judged_rows(phase, 1, "t_1", None, value) == []
        ((name, found),) = judged_rows(phase, 1, "t_1", 3, value)
        assert (name, len(found)) == (table, rows)
        assert {(row["training_step"], row["task_id"], row["rollout"]) for row in found} == {(1, "t_1", 3)}


def test_later_phases_are_more_urgent_and_what_is_of_no_phase_is_least() -> None:
    ranks = [phase_rank(name) for name in PHASES]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == len(PHASES)
    assert phase_rank(None) == phase_rank("of nobody") == 0


class Recorder:
    """In the place of a worker's judge: keeps what it is asked."""

    def __init__(self) -> None:
        self.questions: list[Any] = []

    async def ask(self, question: Any, context: CallContext) -> Judged[Any]:
        self.questions.append(question)
        return Judged(value=())


async def test_a_worker_passes_values_on_and_a_failed_phase_as_nothing() -> None:
    """Without Ray: what references stand for has arrived already."""
    recorder = Recorder()
    worker: Any = SimpleNamespace(_judge=recorder)
    ask: Any = JudgeWorkerActor.ask
    failed: Judged[tuple[Criterion, ...]] = Judged(value=None, error="failed")
    first, second = (Judged(value=(criterion,)) for criterion in RUBRIC)
    trajectory = example_trajectory()
    await ask(worker, Union, WHERE, messages=PROMPT, candidates=[first, failed, second], trajectories=[trajectory])
    await ask(worker, Credit, WHERE, trajectory=trajectory, rubric=first, scores=Judged(value=SCORES), criteria=(0,))
    await ask(worker, Score, WHERE, trajectory=trajectory, rubric=failed)
    await ask(worker, Stage1, WHERE, messages=PROMPT)
    assert recorder.questions == [
        Union(PROMPT, list(RUBRIC), [trajectory]),
        Credit(trajectory, RUBRIC[:1], SCORES, (0,)),
        Score(trajectory, ()),
        Stage1(PROMPT),
    ]
