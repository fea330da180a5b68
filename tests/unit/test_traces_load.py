"""`load_traces`: every format by its own files, and files that are nothing of the kind.

``inspect.json``, ``inspect.eval`` and ``verifiers.jsonl`` were written by those packages (inspect_ai 0.3.285 with a
solver that plays a script; verifiers 0.4.0 from its own `Trace`), the others by hand after their schemas.
"""

from __future__ import annotations

import errno
import gzip
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draco_ray.errors import ConfigError, TraceError
from draco_ray.records import EpisodeEnd
from draco_ray.runs.directory import RunDirectory
from draco_ray.traces.load import Groups, load_traces
from draco_ray.traces.model import Trace
from tests.conftest import REPOSITORY
from tests.support.small_run import small_run

FILES = REPOSITORY / "tests/support/traces"
BY_FORMAT = {
    "openai-chat": "openai_chat.jsonl",
    "openai-responses": "openai_responses.jsonl",
    "anthropic": "anthropic.jsonl",
    "inspect": "inspect.json",
    "tau2": "tau2.json",
    "verifiers": "verifiers.jsonl",
    "otel": "otlp.jsonl",
}
SEARCH = 'search_flights({"origin": "JFK", "destination": "SFO"})'


def one(path: Path, **options: Any) -> Trace:
    return load_traces(path, **options)[-1].traces[0]


def chat(**fields: Any) -> dict[str, Any]:
    """The least that is a trace."""
    said = [{"role": "user", "content": "Add 1 and 1."}, {"role": "assistant", "content": "2"}]
    return {"messages": said, **fields}


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def test_the_examples_traces_are_four_of_one_task() -> None:
    groups = load_traces(REPOSITORY / "examples/traces")
    assert groups.problems == ()
    (group,) = groups
    steps = {each.trace_id: each.steps for each in group.summaries}
    assert steps == {"careful": 4, "tries first": 4, "does not look": 2, "mends it": 5}


@pytest.mark.parametrize("name", sorted(BY_FORMAT))
def test_each_format_is_recognised_and_named(name: str) -> None:
    groups = load_traces(FILES / BY_FORMAT[name])
    assert not groups.problems
    assert [len(group) for group in groups] == ([2, 2] if name == "inspect" else [2])
    summary = groups[0].summaries[0]
    assert (summary.format, bool(summary.notes)) == (name, False)
    trace = groups[-1].traces[0]
    first = next(turn for turn in trace.steps if turn.action is not None)
    assert SEARCH in (first.action or "")
    assert "DL9 380 USD" in (first.observation or "")
    assert (first.action or "") in first.text
    assert "JFK to SFO" in trace.prompt[-1 if name == "tau2" else 1].content
    assert load_traces(FILES / BY_FORMAT[name], format=name)[-1].traces[0] == trace
    assert len({each.trace_id for each in groups[0].traces}) == 2


def test_a_chat_is_steps_gaps_and_what_came_back() -> None:
    trace = one(FILES / "openai_chat.jsonl")
    assert [(turn.role, turn.action is not None, turn.is_step) for turn in trace.turns] == [
        ("assistant", True, True),
        ("assistant", False, True),
        ("user", False, False),
        ("assistant", True, True),
        ("assistant", False, True),
    ]
    # Two calls at once, whose results come in another order.
    assert trace.steps[0].observation == (
        "(result 1 of 2, search_flights)\nUA1 420 USD\nDL9 380 USD\n\n(result 2 of 2, search_flights)\nB6 395 USD"
    )
    assert trace.ended is EpisodeEnd.FINISHED
    assert [message.role for message in trace.prompt] == ["system", "user", "tools"]
    assert "[image: image/png, 12 kB]" in trace.prompt[1].content
    assert trace.prompt[2].content.startswith("search_flights: Search flights between two airports.")


def test_the_same_run_in_four_dialects_is_the_same_trace() -> None:
    """But for what one of them has and others have not: a user's turn, a failed tool, thinking."""
    actions = [
        [turn.action for turn in one(FILES / BY_FORMAT[name]).steps if not turn.message]
        for name in ("openai-chat", "openai-responses", "anthropic")
    ]
    assert actions[0] == actions[1] == actions[2]
    thought = one(FILES / "openai_responses.jsonl").turns[0].text
    assert thought == one(FILES / "anthropic.jsonl").turns[0].text
    assert thought.startswith("<think>I need prices.</think>\nI will search first.")
    assert "[error] no such airport" in (one(FILES / "anthropic.jsonl").turns[0].observation or "")


def test_spans_of_two_traces_interleaved_are_two_conversations() -> None:
    first, second = load_traces(FILES / "otlp.jsonl")[0].traces
    assert [turn.action for turn in first.steps][1:] == ['book({"flight": "DL9"})', None]
    assert [turn.action for turn in second.steps][1:] == ['book({"flight": "UA1"})', None]
    # What the spans repeat of the conversation so far is there once.
    assert [turn.role for turn in first.turns] == ["assistant", "assistant", "sub-agent checker", "assistant"]
    assert first.turns[2].text == "The price is right."
    assert first.source.startswith(f"{FILES / 'otlp.jsonl'}:1 trace ")


def test_a_result_that_only_a_tools_span_holds(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (FILES / "otlp.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            # The conversation ends with the first call.
            span["attributes"] = [] if span["spanId"] in ("b2", "b3", "b4") else span["attributes"]
    trace = one(written(tmp_path / "otlp.jsonl", *lines))
    assert [turn.observation for turn in trace.turns] == ["UA1 420 USD\nDL9 380 USD"]


def test_real_spans_of_the_sdk(tmp_path: Path) -> None:
    """As OpenTelemetry's SDK makes them and protobuf writes them, field names and ids in its own spelling."""
    trace_sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = trace_sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with provider.get_tracer("t").start_as_current_span("chat m") as span:
        span.set_attribute("gen_ai.operation.name", "chat")
        span.set_attribute("gen_ai.prompt.0.role", "user")
        span.set_attribute("gen_ai.prompt.0.content", "Add 1 and 1.")
        span.set_attribute("gen_ai.completion.0.role", "assistant")
        span.set_attribute("gen_ai.completion.0.tool_calls.0.name", "add")
        span.set_attribute("gen_ai.completion.0.tool_calls.0.arguments", '{"a": 1}')
    file = tmp_path / "spans.json"
    file.write_text(MessageToJson(encode_spans(kept.get_finished_spans())), encoding="utf-8")
    trace = one(file)
    assert [message.content for message in trace.prompt] == ["Add 1 and 1."]
    assert [turn.action for turn in trace.turns] == ['add({"a": 1})']


@pytest.mark.parametrize(
    "attributes",
    [
        {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "Add 1 and 1.",
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "add",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"a": 1}',
        },
        {
            "langfuse.observation.type": "generation",
            "langfuse.observation.input": json.dumps([{"role": "user", "content": "Add 1 and 1."}]),
            "langfuse.observation.output": json.dumps(
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
            ),
        },
        {
            "mlflow.spanType": '"CHAT_MODEL"',
            "mlflow.spanInputs": json.dumps({"messages": [{"role": "user", "content": "Add 1 and 1."}]}),
            "mlflow.spanOutputs": json.dumps(
                {
                    "choices": [
                        {
                            "message": {
                                "role": "assistant",
                                "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
                            }
                        }
                    ]
                }
            ),
        },
    ],
    ids=["phoenix", "langfuse", "mlflow"],
)
def test_spans_in_the_spelling_of_others(attributes: dict[str, str], tmp_path: Path) -> None:
    span = {
        "trace_id": "t",
        "span_id": "s",
        "name": "chat",
        "start_time": "2026-11-22T03:00:00Z",
        "attributes": attributes,
    }
    trace = one(written(tmp_path / "spans.jsonl", span))
    assert [message.content for message in trace.prompt] == ["Add 1 and 1."]
    assert [turn.action for turn in trace.turns] == ['add({"a": 1})']


def test_what_a_task_is_graded_by_is_not_read() -> None:
    trace = one(FILES / "tau2.json")
    assert "SECRET_GROUND_TRUTH" not in str(trace)
    assert "You are Ann" in trace.prompt[-1].content
    assert [turn.role for turn in trace.turns if turn.action is None] == [
        "earlier assistant",
        "user",
        "assistant",
        "user",
        "user's tool",
        "user",
    ]
    assert [each.outcome for each in load_traces(FILES / "tau2.json")[0].traces] == [1.0, 0.0]


def test_tau2s_directory_format_and_counted_tokens(tmp_path: Path) -> None:
    whole = json.loads((FILES / "tau2.json").read_text(encoding="utf-8"))
    (tmp_path / "simulations").mkdir()
    for number, simulation in enumerate(whole.pop("simulations")):
        (tmp_path / f"simulations/{number}.json").write_text(json.dumps(simulation), encoding="utf-8")
    (tmp_path / "results.json").write_text(json.dumps({**whole, "simulations": []}), encoding="utf-8")
    (group,) = load_traces(tmp_path)
    trace = group.traces[0]
    assert len(group) == 2
    assert trace.prompt[0].content.startswith("# Policy")
    assert trace.tokens_counted
    assert [trace.tokens(turn) for turn in trace.turns if turn.role == "assistant"] == [12, 12]


def test_a_run_directory_of_ours(tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs" / "one")
    groups = load_traces(tmp_path / "runs")
    trace = groups[0].traces[0]
    assert trace.format == "run"
    assert groups[0].task_id.startswith("step1/")
    assert trace.steps
    assert len(groups) == len({(r["training_step"], r["task_id"]) for r in run.table("trajectories").to_pylist()})


def test_a_mapping_for_everything_else() -> None:
    (group,) = load_traces(FILES / "own_format.jsonl", mapping=FILES / "own_format.yaml")
    assert (group.task_id, len(group)) == ("jfk-sfo", 2)
    trace = group.traces[0]
    assert (trace.trace_id, trace.format) == ("1", "mapped")
    assert [(turn.action, turn.observation) for turn in trace.turns] == [
        ("search JFK SFO", "UA1 420 USD\nDL9 380 USD"),
        (None, None),
    ]
    assert not trace.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected keys such as"),
        ("messages: m\nmesages: n", "mesages: Extra inputs"),
        ("task_id: m", "messages: Field required"),
        ("messages: m\naction_pattern: '('", "cannot be read"),
        ("messages: m\naction_pattern: 'a'", "expected a group, \\( \\), around the code"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_mapping_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as raised:
        load_traces(FILES / "own_format.jsonl", mapping=tmp_path / "m.yaml")
    assert "\n" not in str(raised.value)


def test_groups_by_what_names_the_task_else_by_prompt_or_none(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", chat(row={"n": 7}), chat(row={"n": 8}), chat(row={"n": 7}))
    assert [len(group) for group in load_traces(file)] == [3]
    assert load_traces(file)[0].task_id.startswith("prompt-")
    by_row = load_traces(file, group_by="row.n")
    assert [(group.task_id, len(group)) for group in by_row] == [("7", 2), ("8", 1)]
    assert [len(group) for group in load_traces(file, group_by="none")] == [1, 1, 1]
    with pytest.raises(TraceError, match=r"--group-by row.x: expected text or a number there, found nothing \(and 2"):
        load_traces(file, group_by="row.x")


def test_an_id_that_comes_twice_is_told_apart_and_said(tmp_path: Path) -> None:
    (group,) = load_traces(written(tmp_path / "a.jsonl", chat(id="x"), chat(id="x"), chat(id="y")))
    assert [summary.trace_id for summary in group.summaries] == ["x", "x#2", "y"]
    assert group.summaries[1].notes == ("the id x occurs more than once; a suffix tells the traces apart",)


def test_equal_ids_of_different_tasks_are_different_tasks(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "Add 2."}, {"role": "assistant", "content": "3"}]}
    file = written(tmp_path / "a.jsonl", chat(task_id="t"), chat(task_id="t"), {**other, "task_id": "t"})
    assert [(group.task_id, len(group)) for group in load_traces(file)] == [("t", 2), ("t#2", 1)]
    # What is typed is what happens.
    assert [(group.task_id, len(group)) for group in load_traces(file, group_by="task_id")] == [("t", 3)]


def test_what_an_earlier_judging_left_is_no_further_trace(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", chat(id="1"))
    run = small_run(tmp_path / "judged")
    assert len(load_traces(tmp_path)) > 1
    (run.path / "traces.jsonl").write_text("", encoding="utf-8")
    assert [group.summaries[0].trace_id for group in load_traces(tmp_path)] == ["1"]
    assert load_traces(run.path)[0].summaries[0].format == "run"


def test_a_name_that_is_not_utf8_costs_no_trace_but_no_run_is_written_there(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (group,) = load_traces(written(folder / os.fsdecode(b"t\xff.jsonl"), chat(id="1")))
    assert group.traces[0].source.endswith("t\\udcff.jsonl:1")
    with pytest.raises(ConfigError, match="expected a name in UTF-8"):
        RunDirectory.create(folder / "run", "seed: 0\n")


BAD = {
    b"": "is empty",
    b"not json\n": "expected a JSON object, not valid at line 1, column 1",
    b"\xff\xfe\n": "not UTF-8 at byte 0",
    b"[" * 100_000 + b"\n": "nested too deeply",
    b"{}\n": "unknown format, found an object with no keys; expected one of inspect, tau2",
    b"7\n": "unknown format, found a number",
    b'{"messages": 7}\n': "expected a list of messages, found a number; expected an object with",
    b'{"messages": [{"role": "user", "content": "x"}]}\n': "the trace has no turn of an agent",
    b'{"messages": [7]}\n': "message 1: expected an object with a role, found a number",
    b'{"messages": [{"role": 7}]}\n': 'message 1: expected "role" as text, found a number',
    b'{"messages": [{"role": "assistant", "content": 7}]}\n': "expected the message's content as text or a list",
    b'{"messages": [{"role": "assistant", "tool_calls": 7}]}\n': 'expected "tool_calls" as a list',
    b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}\n': "a tool call with the name of a function",
    b'{"resourceSpans": 7}\n': 'expected "resourceSpans" as a list, found a number',
    b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "1"}]}]}]}\n': "none of the 1 spans contains messages",
    b'{"eval": {}, "status": "error", "samples": null}\n': "an Inspect log without samples (status 'error')",
    b'{"task": {}, "traces": [{"nodes": 7}]}\n': 'expected "nodes" as a list of objects, found a number',
    b'{"info": {}, "simulations": [7]}\n': "expected a simulation as an object",
}


@pytest.mark.parametrize("content", sorted(BAD), ids=lambda content: repr(content[:40]))
def test_a_bad_line_is_one_clear_line_and_the_others_are_read(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(TraceError) as raised:
        load_traces(file)
    assert BAD[content] in str(raised.value)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
    file.write_bytes(json.dumps(chat(id="before")).encode() + b"\n" + content + json.dumps(chat(id="after")).encode())
    groups = load_traces(file)
    assert [summary.trace_id for group in groups for summary in group.summaries] == ["before", "after"]
    if content:
        (problem,) = groups.problems
        assert problem.startswith(f"{file}:2")


def test_one_bad_trace_of_a_document_does_not_take_the_others(tmp_path: Path) -> None:
    for name, field in (("inspect.json", "samples"), ("tau2.json", "simulations")):
        document = json.loads((FILES / name).read_text(encoding="utf-8"))
        document[field].insert(1, 7)
        (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")
        groups = load_traces(tmp_path / name)
        assert sum(map(len, groups)) == len(document[field]) - 1
        assert [f"{field[:-1]} 2: " in problem for problem in groups.problems] == [True]


def test_files_of_other_kinds_and_other_packings(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "x"}', encoding="utf-8")
    (tmp_path / "notes.txt").write_text("nothing", encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps([chat(id="1"), chat(id="2")]), encoding="utf-8")
    (tmp_path / "bare.json").write_text(json.dumps(chat()["messages"]), encoding="utf-8")
    written(tmp_path / "lines.json", chat(id="3"), chat(id="4"))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(chat(id="5")))
    (tmp_path / "cut.jsonl.gz").write_bytes((tmp_path / "packed.jsonl.gz").read_bytes()[:-12])
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(chat(id="6")).encode())
    groups = load_traces(tmp_path)
    assert sum(map(len, groups)) == 7
    assert {problem.split(": ")[0].rpartition("/")[2] for problem in groups.problems} == {
        "package.json",
        "cut.jsonl.gz",
    }


INDENTED = json.dumps(chat(), indent=1)
PACKINGS = {
    "indented.jsonl": (INDENTED, 1, ""),
    # As `jq . traces.jsonl` prints them.
    "indented_many.jsonl": ("\n".join([INDENTED] * 3), 3, ""),
    "indented_many.json": ("\n".join([INDENTED] * 3), 3, ""),
    "indented_cut.json": ("\n".join([INDENTED] * 3)[:-9], 2, "not valid at line"),
    "array_in_a_line.jsonl": (json.dumps([chat(), chat()]), 2, ""),
    "list_cut.json": (json.dumps([chat()] * 3, indent=1)[:-30], 2, "not valid at line 33"),
    "list_cut_in_lines.json": ("[\n" + ",\n".join([json.dumps(chat())] * 3)[:-9], 2, "not valid at line 4"),
    "lists.json": (json.dumps([chat()]) + json.dumps([chat(), chat()]), 3, ""),
    "messages_cut.json": (json.dumps(chat()["messages"] * 2)[:-9], 0, "expected JSON, not valid"),
    "first_line_bad.json": ("{bad\n" + json.dumps(chat()), 1, "first_line_bad.json:1: expected a JSON object"),
    "old_windows.jsonl": (f"\r\n{json.dumps(chat())}\r\n\r\n{json.dumps(chat())}\r\n", 2, ""),
    "blank.jsonl": ("\n \n", 0, "is empty"),
    "blank.json": ("\n \n", 0, "is empty"),
}


@pytest.mark.parametrize("name", sorted(PACKINGS))
def test_values_one_behind_the_other_and_documents_that_are_cut(name: str, tmp_path: Path) -> None:
    content, traces, problem = PACKINGS[name]
    (tmp_path / name).write_bytes(content.encode())
    written(tmp_path / "other.jsonl", chat(id="other"))
    groups = load_traces(tmp_path)
    assert sum(map(len, groups)) == traces + 1
    assert len(groups.problems) == bool(problem)
    assert problem in "".join(groups.problems)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_named_with_what_helps(encoding: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "café"}, {"role": "assistant", "content": "2"}]
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(json.dumps({"messages": said}, ensure_ascii=False).encode(encoding))
        with pytest.raises(TraceError, match=r"not UTF-8 at byte \d+; convert it with `iconv -t utf-8`"):
            load_traces(tmp_path / name)


def test_a_link_is_read_and_one_to_another_trace_adds_nothing(tmp_path: Path) -> None:
    folder, store = tmp_path / "traces", tmp_path / "store"
    folder.mkdir()
    store.mkdir()
    written(folder / "run.jsonl", chat(id="run"))
    (folder / "latest.jsonl").symlink_to("run.jsonl")
    (folder / "kept.jsonl").symlink_to(written(store / "0a1b2c", chat(id="kept")))
    (folder / "round").symlink_to(folder)
    (folder / "nowhere.jsonl").symlink_to("gone")
    groups = load_traces([folder, folder / "run.jsonl"])
    assert sorted(each.trace_id for group in groups for each in group.summaries) == ["kept", "run"]


def test_files_of_no_kind_that_is_read_are_counted_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(FILES / "openai_chat.jsonl", tmp_path)
    (tmp_path / "more").mkdir()
    for name in ("a.csv", "more/b.csv", ".hidden.csv", "README"):
        (tmp_path / name).write_text("x")
    load_traces(tmp_path)
    (line,) = (record.getMessage() for record in caplog.records if "ignored" in record.getMessage())
    assert line.endswith("are ignored: 2 of .csv, 1 of README")


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes((FILES / "openai_chat.jsonl").read_bytes())
    os.mkfifo(tmp_path / "pipe.jsonl")
    groups = load_traces(tmp_path)
    assert {each.source.rpartition(":")[0] for group in groups for each in group.summaries} == {
        str(tmp_path / "traces.jsonl")
    }


def test_a_folder_that_may_not_be_read_is_a_problem_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_bytes((FILES / "openai_chat.jsonl").read_bytes())
    (tmp_path / "theirs").mkdir()
    listed = Path.iterdir

    def refused(self: Path) -> Iterator[Path]:
        # Permissions do not bind the root user, who may run this.
        if self.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", refused)
    groups = load_traces(tmp_path)
    assert groups
    (said,) = groups.problems
    assert said.startswith(f"{tmp_path / 'theirs'}: cannot be read")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        load_traces(tmp_path / "absent")
    with pytest.raises(TraceError, match=r"no .json, .jsonl or .eval file and no run directory in it"):
        load_traces(tmp_path)
    with pytest.raises(TraceError, match="none of the files has one in the format claude-code"):
        load_traces(FILES / "openai_chat.jsonl", format="claude-code")
    with pytest.raises(ConfigError, match="format 'chat': unknown; expected one of auto, inspect"):
        load_traces(tmp_path, format="chat")
    with pytest.raises(TraceError, match="expected a run directory"):
        load_traces(FILES / "tau2.json", format="run")


def test_the_packed_inspect_log_names_what_reads_it(tmp_path: Path) -> None:
    """Or is read: by inspect_ai itself, where it is installed."""
    file = Path(shutil.copy(FILES / "inspect.eval", tmp_path))
    if importlib.util.find_spec("inspect_ai"):
        packed, plain = (
            {group.task_id: [each.turns for each in group.traces] for group in load_traces(path)}
            for path in (file, FILES / "inspect.json")
        )
        assert packed == plain
        return
    with pytest.raises(TraceError, match=r"pip install inspect_ai"):
        load_traces(file)


def test_text_that_no_file_can_hold_and_parts_that_nobody_knows(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "caf\ud800é 猫"},
        {"role": "narrator\n[USER]", "content": "Meanwhile"},
        {
            "role": "assistant",
            "content": [
                {"type": "hologram", "of": "cat"},
                {"type": "input_audio", "input_audio": {"data": "A" * 4000, "format": "wav"}},
            ],
            "tool_calls": [{"id": "1", "function": {"name": "run", "arguments": json.dumps({"code": "a\nb", "n": 1})}}],
        },
        {"role": "tool", "tool_call_id": "other", "content": {"type": "text", "text": "late"}},
    ]
    trace = one(written(tmp_path / "a.jsonl", {"messages": said}))
    assert trace.prompt[0].content == "caf\\ud800é 猫"
    assert trace.prompt[1].role == "narrator user"
    assert trace.turns[0].action == "run(\n  code =\na\nb\n  n = 1\n)"
    assert '[hologram: {"type": "hologram", "of": "cat"}]' in trace.turns[0].text
    assert "[input_audio: wav, 3 kB]" in trace.turns[0].text or "[audio: wav, 3 kB]" in trace.turns[0].text
    assert (trace.turns[1].role, trace.turns[1].text) == ("tool", "late")
    assert trace.notes == (
        "a tool result without a call is shown at its place in the conversation",
        "the trace ends without an answer of the agent",
    )
    str(trace).encode("utf-8")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_put_anywhere_in_a_record_is_read_or_said(data: st.DataObject) -> None:
    """A value somewhere in a record replaced by any other: the trace is read, or a line says why not."""
    import tempfile

    name = data.draw(st.sampled_from(sorted(BY_FORMAT.values())))
    text = (FILES / name).read_text(encoding="utf-8")
    record = json.loads(text if name.endswith(".json") else text.splitlines()[0])
    node: Any = record
    path: list[Any] = []
    while isinstance(node, dict | list) and node and (not path or data.draw(st.integers(0, 5))):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    holder, key = path[-1]
    holder[key] = data.draw(JSON)
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder) / "a.jsonl", record)
        try:
            groups = load_traces(file)
        except TraceError as error:
            said = str(error)
            groups = Groups()
        else:
            said = "\n".join(groups.problems)
        assert groups or said
        assert len(said.splitlines()) <= 1
        for group in groups:
            for trace in group.traces:
                assert trace.turns
                assert str(trace).encode("utf-8")


def test_groups_may_be_read_by_several_threads_at_once(tmp_path: Path) -> None:
    groups = load_traces(written(tmp_path / "a.jsonl", *(chat(id=str(n), task_id=str(n)) for n in range(50))))
    with ThreadPoolExecutor(max_workers=8) as threads:
        found = list(threads.map(lambda group: group.traces[0].trace_id, groups * 40))
    assert found == [str(n) for n in range(50)] * 40


def test_thousands_of_traces_are_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    file = tmp_path / "many.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for number in range(400):
            said = [{"role": "user", "content": f"Task {number}"}, {"role": "assistant", "content": "x" * 50_000}]
            lines.write(json.dumps({"messages": said}) + "\n")
    tracemalloc.start()
    groups = load_traces(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(groups) == 400
    assert peak < file.stat().st_size / 4
    assert groups[399].traces[0].turns[0].text == "x" * 50_000
