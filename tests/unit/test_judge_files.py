"""The judge that answers through files: numbered prompts, replies beside them, and a command that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draco_ray import judge_sync, load_traces
from draco_ray.cli import main
from draco_ray.commands.grade import write_github_annotations
from draco_ray.config.schema import JudgeConfig
from draco_ray.errors import BudgetSpent, JudgeUnavailable, StoreError
from draco_ray.judging import file_judge
from draco_ray.judging.completion import Completion, Request
from draco_ray.judging.file_judge import PROMPT, REPLY, SCHEMA, FileJudge
from draco_ray.judging.panel import member_config
from draco_ray.judging.reply import with_tag
from draco_ray.judging.reply_cache import REPLIES_FILE, ReplyCache, read_cost_ledger
from draco_ray.records import Message
from draco_ray.traces.library import open_judge, plan
from tests.conftest import REPOSITORY
from tests.support.canned_judge import answer
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

WAITED = file_judge.SETTLE_SECONDS
TRACES = Path(__file__).parents[1] / "support" / "traces" / "openai_chat.jsonl"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_judge, "SETTLE_SECONDS", 0.3)
    monkeypatch.setattr(file_judge, "PAUSE_SECONDS", 0.3)


def request(text: str = "Grade this.", *, vote: int = 0, phase: str = "score") -> Request:
    return Request(messages=(Message(role="user", content=text),), vote=vote, phase=phase, schema={"type": "object"})


async def written(folder: Path, count: int) -> list[Path]:
    """The prompts in ``folder``, once there are ``count``."""

    def look() -> list[Path]:
        while len(found := sorted(folder.glob(f"*{PROMPT}"))) < count:
            time.sleep(0.01)
        return found

    return await asyncio.to_thread(look)


async def replied(judge: FileJudge, asked: Request, folder: Path, text: str) -> Completion:
    """The completion, when ``text`` is written beside the newest prompt."""
    waiting = asyncio.create_task(judge(asked))
    prompts = await written(folder, 1)
    prompts[-1].with_name(prompts[-1].name.replace(PROMPT, REPLY)).write_text(text)
    return await waiting


async def test_a_prompt_is_written_with_its_schema_and_its_reply_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "asked"
    completion = await replied(FileJudge(folder, "files:asked"), request(), folder, '{"entries": []}')
    assert (completion.text, completion.finish_reason, completion.dollars) == ('{"entries": []}', "stop", 0.0)
    (prompt,) = folder.glob(f"*{PROMPT}")
    assert prompt.name.startswith("0001-score-")
    assert prompt.read_text() == "Grade this."
    assert json.loads(prompt.with_name(prompt.name.replace(PROMPT, SCHEMA)).read_text()) == {"type": "object"}


async def test_the_same_question_has_the_same_file_in_every_process(tmp_path: Path) -> None:
    first = await replied(FileJudge(tmp_path, "files:d"), request(), tmp_path, "one")
    again = await FileJudge(tmp_path, "files:d")(request())
    assert first.text == again.text == "one"
    assert len([*tmp_path.glob(f"*{PROMPT}")]) == 1


async def test_many_processes_number_their_prompts_without_gaps(tmp_path: Path) -> None:
    judges = [FileJudge(tmp_path, "files:d") for _ in range(4)]
    asked = [request(f"Grade {number}.", vote=number % 2) for number in range(20)]
    waiting = [asyncio.create_task(judges[place % 4](each)) for place, each in enumerate([*asked, request("Grade 0.")])]
    prompts = await written(tmp_path, 20)
    for prompt in prompts:
        prompt.with_name(prompt.name.replace(PROMPT, REPLY)).write_text(prompt.read_text())
    answers = [each.text for each in await asyncio.gather(*waiting)]
    assert answers == [*(f"Grade {number}." for number in range(20)), "Grade 0."]
    assert [int(prompt.name[:4]) for prompt in prompts] == [*range(1, 21)]


async def test_a_reply_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request()))
    prompts = await written(tmp_path, 1)
    with prompts[0].with_name(prompts[0].name.replace(PROMPT, REPLY)).open("w") as file:
        for part in range(30):
            file.write(f"{part} ")
            file.flush()
            await asyncio.sleep(0.05)
    assert (await waiting).text.split() == [str(part) for part in range(30)]


async def test_a_model_may_pause_while_its_output_is_redirected_into_the_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_judge, "SETTLE_SECONDS", WAITED)
    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request()))
    prompts = await written(tmp_path, 1)
    with prompts[0].with_name(prompts[0].name.replace(PROMPT, REPLY)).open("w") as file:
        file.write('{"entries": [')
        file.flush()
        await asyncio.sleep(1.3)
        file.write("]}")
    assert (await waiting).text == '{"entries": []}'


async def test_a_reply_that_arrives_in_blocks_is_read_when_its_json_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_judge, "PAUSE_SECONDS", 60.0)
    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request()))
    prompts = await written(tmp_path, 1)
    whole = '\ufeffI think "é". ```json\r\n{"entries": [{"title": "é[0"}]}\r\n```\r\n'.encode()
    with prompts[0].with_name(prompts[0].name.replace(PROMPT, REPLY)).open("wb", buffering=0) as file:
        for block in (whole[:12], whole[12:50], whole[50:]):
            file.write(block)
            await asyncio.sleep(1.2)
    assert (await waiting).text == 'I think "é". ```json\n{"entries": [{"title": "é[0"}]}\n```\n'


async def test_a_reply_may_vanish_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def renamed(path: Path, **given: str) -> str:
        monkeypatch.setattr(Path, "read_text", read)
        path.unlink()
        return read(path, **given)

    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request()))
    prompts = await written(tmp_path, 1)
    reply = prompts[0].with_name(prompts[0].name.replace(PROMPT, REPLY))
    monkeypatch.setattr(Path, "read_text", renamed)
    reply.write_text("refused by another process")
    await asyncio.to_thread(_until, lambda: not reply.exists())
    reply.write_text("{}")
    assert (await waiting).text == "{}"


@pytest.mark.parametrize("wrong", [f"PROMPT{REPLY}", "0001.reply.txt", "0001-answer.json"])
async def test_what_is_waited_for_is_said_at_once_and_so_is_a_misnamed_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request()))
    (prompt,) = await written(tmp_path, 1)
    misnamed = tmp_path / wrong.replace("PROMPT", prompt.name)
    misnamed.write_text("misnamed")
    await asyncio.to_thread(_until, lambda: len(caplog.messages) > 1)
    prompt.with_name(prompt.name.replace(PROMPT, REPLY)).write_text("right")
    assert (await waiting).text == "right"
    wanted = str(prompt).replace(PROMPT, REPLY)
    assert caplog.messages[0] == f"1 prompt waits for a reply: read {prompt}, then write {wanted}"
    assert caplog.messages[1].startswith(f"{misnamed} is ignored; the reply is read from")


async def test_all_waiting_prompts_and_refused_replies_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = FileJudge(tmp_path, "files:d")
    waiting = [asyncio.create_task(judge(request(f"Grade {number}."))) for number in range(3)]
    prompts = await written(tmp_path, 3)
    await asyncio.to_thread(_until, lambda: len(caplog.messages) > 1)
    for prompt in prompts:
        prompt.with_name(prompt.name.replace(PROMPT, REPLY)).write_text("{}")
    await asyncio.gather(*waiting)
    last = caplog.messages[-1]
    assert last == f"then likewise: {', '.join(prompt.name.removesuffix(PROMPT) for prompt in prompts[1:])}"
    await judge.forget(request("Grade 0."))
    assert caplog.messages[-1].startswith("a reply could not be used and is now ")
    assert caplog.messages[-1].endswith(f"{REPLY}.refused")


async def test_what_an_earlier_command_asked_and_a_reply_without_its_tag_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = asyncio.create_task(FileJudge(tmp_path, "files:d")(request("Grade the old trace.")))
    (old,) = await written(tmp_path, 1)
    stopped.cancel()
    waiting = asyncio.create_task(FileJudge(tmp_path, "files:d")(request(with_tag("Grade the new trace."))))
    prompts = await written(tmp_path, 2)
    await asyncio.to_thread(_until, lambda: len(caplog.messages) > 1)
    assert caplog.messages[1] == f"this command does not wait for replies to: {old.name.removesuffix(PROMPT)}"
    reply = prompts[1].with_name(prompts[1].name.replace(PROMPT, REPLY))
    reply.write_text('{"entries": []}')
    await waiting
    assert caplog.messages[-1] == (
        f"{reply.name} contains no request_tag, so a reply to the wrong prompt would not be noticed"
    )


def _until(seen: Callable[[], bool]) -> None:
    while not seen():
        time.sleep(0.05)


def test_other_judges_directories_are_the_same_ones_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    config = JudgeConfig.model_validate({"jury": [{"model": "files:a"}], "held_out": {"model": "files:b"}})
    monkeypatch.chdir("/")
    assert config.held_out is not None
    assert [member_config(config, each).files for each in (*config.jury, config.held_out)] == [here / "a", here / "b"]


def test_a_dry_run_through_files_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "answers"
    with pytest.raises(SystemExit, match="0"):
        main(["judge", str(TRACES), "--dry-run", "--judge", f"files:{folder}"])
    assert "1 group of 2 traces of one task" in capsys.readouterr().out
    assert not folder.exists()


async def test_a_refused_reply_is_set_aside_and_the_question_waits_again(tmp_path: Path) -> None:
    judge = FileJudge(tmp_path, "files:d")
    await replied(judge, request(), tmp_path, "nonsense")
    await judge.forget(request())
    assert [path.read_text() for path in tmp_path.glob("*.refused")] == ["nonsense"]
    assert (await replied(judge, request(), tmp_path, "better")).text == "better"


async def test_a_record_without_a_reply_is_an_error_and_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "recorded").write_text("somebody, some day")
    with pytest.raises(
        StoreError, match="no recorded reply to this score prompt, because traces or prompts have changed"
    ):
        await FileJudge(tmp_path, "files:d")(request())
    assert [path.name for path in tmp_path.iterdir()] == ["recorded"]


async def test_a_record_whose_prompt_has_no_reply_is_an_error_too_and_its_replies_stay(tmp_path: Path) -> None:
    judge = FileJudge(tmp_path, "files:d")
    await replied(judge, request(), tmp_path, "{}")
    (tmp_path / "recorded").write_text("somebody, some day")
    await judge.forget(request())
    assert (await judge(request())).text == "{}"
    next(tmp_path.glob(f"*{REPLY}")).unlink()
    with pytest.raises(StoreError, match="no recorded reply"):
        await judge(request())


async def test_what_an_interrupted_process_and_people_leave_in_the_directory_costs_no_prompt(tmp_path: Path) -> None:
    judge = FileJudge(tmp_path, "files:d")
    await replied(judge, request(), tmp_path, "nonsense")
    # Only replies were copied, one of them is refused, and a process ended between a schema and its prompt.
    next(tmp_path.glob(f"*{PROMPT}")).unlink()
    await judge.forget(request())
    (tmp_path / "1.txt").write_text("notes")
    assert (await replied(judge, request(), tmp_path, "better")).text == "better"


async def test_a_reply_that_is_no_text_is_named(tmp_path: Path) -> None:
    await replied(FileJudge(tmp_path, "files:d"), request(), tmp_path, "{}")
    (reply,) = tmp_path.glob(f"*{REPLY}")
    reply.write_bytes("{}".encode("utf-16"))
    with pytest.raises(StoreError, match=rf"{reply.name}: 'utf-8' codec can't decode .*; expected UTF-8"):
        await FileJudge(tmp_path, "files:d")(request())


async def test_two_processes_may_refuse_one_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = FileJudge(tmp_path, "files:d")
    await replied(judge, request(), tmp_path, "nonsense")
    rename = Path.rename

    def second(path: Path, target: str) -> None:
        rename(path, target)
        rename(path, target)

    monkeypatch.setattr(Path, "rename", second)
    await judge.forget(request())
    assert [path.read_text() for path in tmp_path.glob("*.refused")] == ["nonsense"]


async def test_a_conversation_shows_who_said_what(tmp_path: Path) -> None:
    messages = (*request().messages, Message(role="assistant", content="?"), Message(role="user", content="Again."))
    await replied(FileJudge(tmp_path, "files:d"), Request(messages=messages), tmp_path, "{}")
    (prompt,) = tmp_path.glob(f"*-question-*{PROMPT}")
    assert prompt.read_text() == "[user]\nGrade this.\n\n[assistant]\n?\n\n[user]\nAgain."


async def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"judge files:d: .*file") as refusal:
        await FileJudge(tmp_path / "file", "files:d")(request())
    assert "\n" not in str(refusal.value)


def answer_all(folder: Path, done: threading.Event) -> None:
    """Write a reply beside every prompt without one."""
    while not done.wait(0.05):
        for prompt in folder.glob(f"*{PROMPT}"):
            reply = prompt.with_name(prompt.name.replace(PROMPT, REPLY))
            if not reply.exists():
                reply.write_text(answer(prompt.read_text()))


def test_traces_are_judged_by_files_and_a_full_directory_is_a_recorded_judge(tmp_path: Path) -> None:
    done, folder = threading.Event(), tmp_path / "asked"
    writer = threading.Thread(target=answer_all, args=(folder, done))
    writer.start()
    try:
        judged = judge_sync(load_traces([TRACES]), f"files:{folder}")
    finally:
        done.set()
        writer.join()
    again = judge_sync(load_traces([TRACES]), f"files:{folder}")
    verdicts = [[rollout.verdicts for rollout in group.rollouts] for group in judged]
    assert verdicts == [[rollout.verdicts for rollout in group.rollouts] for group in again]
    assert any(each for group in verdicts for each in group)


def test_the_example_traces_replay_a_recorded_judgement_with_annotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    with pytest.raises(SystemExit, match="0"):
        main(["judge", str(REPOSITORY / "examples" / "traces"), "--replay", "--github"])
    lines = [json.loads(line) for line in (tmp_path / "replayed" / "judged.jsonl").read_text().splitlines()]
    shares = {line["trace_id"]: line["pass_share"] for line in lines}
    assert shares == {"careful": 1.0, "tries first": 0.5, "does not look": 0.0, "mends it": pytest.approx(2 / 3)}
    # A lie in the closing message is blamed on that message.
    (look,) = [line for line in lines if line["trace_id"] == "does not look"]
    assert {verdict["title"]: verdict["steps"] for verdict in look["verdicts"]}["Hides no missed condition"] == [2]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("::error file=")]) == 10
    assert (tmp_path / "summary.md").read_text().count("| ") > 4
    assert "Traces, worst first" in (tmp_path / "replayed" / "report.html").read_text()


def test_annotations_and_summaries_hold_no_command_and_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    said = "50% done\n::set-output name=x::1 <img src=x> | cell"
    verdict = {"title": said, "verdict": "FAIL", "steps": [2], "explanation": said, "justification": ""}
    line = {"trace_id": said, "task_id": "t", "pass_share": 0.0, "source": f"{said}.jsonl:1", "error": None}
    write_github_annotations([{**line, "verdicts": [verdict]}])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "%0A%3A%3Aset-output" in out
    summary = (tmp_path / "summary.md").read_text()
    assert len(summary.splitlines()) == 3
    assert "<img" not in summary
    assert "\\| cell" in summary


def test_unanswered_requests_stay_booked_until_they_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with ScriptedJudgeServer(answer=answer) as server:
        command = ["judge", str(TRACES), "--judge", "openai/gpt-5.4", "--api-base", server.base, "--budget", "5"]
        command += ["--out", str(tmp_path / "judged")]

        def said(*more: str) -> str:
            with pytest.raises(SystemExit, match="0"):
                main([*command, *more])
            return capsys.readouterr().out

        assert "stay reserved" not in said()
        cache = tmp_path / "judged" / "judge_cache"
        spent = read_cost_ledger(cache).dollars
        # A process that was killed between sending and the reply.
        with contextlib.closing(sqlite3.connect(cache / REPLIES_FILE)) as connection, connection:
            connection.execute("INSERT INTO requests VALUES ('killed-1', 0.25, NULL)")
        assert "1 request of an earlier process had no answer and may have been billed: $0.2500 stay reserved" in said()
        assert read_cost_ledger(cache).dollars == pytest.approx(spent + 0.25)
        assert "$0.2500 of unanswered requests now count as not billed" in said("--release")
        assert read_cost_ledger(cache).dollars == pytest.approx(spent)
        assert "stay reserved" not in said()


def test_a_jury_that_cannot_answer_is_named_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its calls would fail alone, and the judge's verdicts would count as a majority's."""
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with ScriptedJudgeServer(answer=answer) as server, ScriptedJudgeServer(Reply("who are you?", 401)) as other_server:
        config = {"judge": {"jury": [{"model": "openai/second", "api_base": other_server.base}]}}
        with pytest.raises(JudgeUnavailable, match=r"judge openai/second at .*who are you"):
            judge_sync(load_traces(TRACES), "openai/m", api_base=server.base, config=config, out=tmp_path / "judged")
        assert len(server.requests) == 1


def test_the_requests_of_a_jury_are_limited_over_all_groups() -> None:
    settled = plan("openai/m", config={"judge": {"jury": [{"model": "openai/second"}, {"model": "openai/third"}]}})
    meter = open_judge(settled)
    second, third = (member_config(settled.config.judge, each) for each in settled.config.judge.jury)
    assert meter.open_other(second) is meter.open_other(second) is not meter.open_other(third)


async def test_unanswered_requests_that_leave_too_little_stop_the_command_instead_of_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    await ReplyCache(tmp_path).begin("killed-1", 0.9999)
    meter = open_judge(plan("openai/gpt-5.4", config={"judge": {"cache": str(tmp_path)}}, budget=1.0))
    with pytest.raises(BudgetSpent, match=r"\$0\.9999 of judge\.limits\.dollars=1 is spent"):
        await asyncio.wait_for(meter.check(), 60)
