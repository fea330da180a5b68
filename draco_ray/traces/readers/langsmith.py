"""Runs of LangSmith, one per line, grouped by trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draco_ray.traces.calls import ModelCall, main_conversation
from draco_ray.traces.entry import AGENT, BadTrace, Entry, object_of
from draco_ray.traces.formats import ReadOptions, build_trace, get_field, path_value, register_format
from draco_ray.traces.messages import entries, reply_entries
from draco_ray.traces.model import Trace, printable_id
from draco_ray.traces.model_request import first_path_value, is_messages, request_entries


def is_langsmith(record: object) -> bool:
    """Whether the record is a run as exported by LangSmith."""
    return isinstance(record, Mapping) and "run_type" in record and "inputs" in record


def session(record: Any, file: str) -> str | None:
    """Id of the trace that a run belongs to; without one, the run's own id, or else the file."""
    return str(record.get("trace_id") or record.get("id") or file)


@register_format(
    "langsmith", 'a run of LangSmith: an object with "run_type", "inputs" and "outputs"', is_langsmith, session=session
)
def read(runs: Any, reading: ReadOptions) -> Iterator[Trace]:
    """The trace assembled from all runs of a session. Raises: BadTrace if no run contains messages."""
    runs = sorted(
        _flat(runs),
        key=lambda run: str(run.get("dotted_order") or run.get("start_time") or ""),
    )
    ids = {str(run.get("id")) for run in runs}
    root = next((run for run in runs if str(run.get("parent_run_id")) not in ids), runs[0])
    said = _state(root)
    models = [run for run in runs if run.get("run_type") in ("llm", "chat_model")]
    if not any(entry.role == AGENT for entry in said):
        said = main_conversation([ModelCall(inputs=_messages(run["inputs"]), outputs=_answer(run)) for run in models])
    elif not any(entry.role == "system" for entry in said):
        # The state of a LangGraph graph lacks a system prompt that a node prepends: take it from the first model run.
        told = [entry for run in models[:1] for entry in _messages(run["inputs"]) if entry.role == "system"]
        said = told + said
    if not said:
        raise BadTrace("no run of the trace contains messages")
    yield build_trace(
        said,
        {**object_of(object_of(root, "extra"), "metadata"), **root},
        reading,
        trace_id=printable_id(root.get("trace_id") or root.get("id") or ""),
        tools=next((tools for run in runs if (tools := path_value(run, "extra.invocation_params.tools"))), None),
    )


def _flat(runs: Any) -> Iterator[Any]:
    """The runs and all their descendants (``child_runs``)."""
    for run in runs:
        yield run
        yield from _flat(run.get("child_runs") or ())


def _state(run: Mapping[str, Any]) -> list[Entry]:
    """The messages in the final state of a LangGraph graph, which ``run`` outputs; empty if there are none."""
    after = get_field(run.get("outputs"), "messages") or path_value(run, "outputs.output.messages")
    return entries(after) if is_messages(after) else []


def _messages(inputs: object) -> list[Entry]:
    listed = first_path_value([inputs], ("messages.0", "prompt.0", "input.0"))
    return entries(listed) if isinstance(listed, list) else request_entries(inputs)


def _answer(run: Mapping[str, Any]) -> list[Entry]:
    outputs = run.get("outputs")
    return reply_entries(outputs) if isinstance(outputs, Mapping | list | str) else []
