"""The formats of records by name, in the order in which they are tried: one small reader each."""

from __future__ import annotations

import contextlib

from draco_ray.traces import otel
from draco_ray.traces.entry import UNREADABLE
from draco_ray.traces.formats import Format
from draco_ray.traces.readers import benchmarks, chat, coding, langsmith

MESSAGES = {
    "anthropic": 'an object with "messages", whose content are blocks (tool_use, tool_result), and perhaps "system"',
    "openai-responses": 'an object with "input" and "output" items (function_call, function_call_output)',
    "openai-chat": 'an object with "messages", each with "role" and "content" or "tool_calls"',
    "messages": "messages of LangChain, AutoGen, Gemini, ShareGPT and their like",
}
"""What records of messages look like, by dialect."""
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format(
            name="inspect",
            shape='an Inspect log: an object with "eval", "status" and "samples"',
            recognises=benchmarks.is_inspect,
            read=benchmarks.read_inspect,
            metered=False,
        ),
        Format(
            name="tau2",
            shape='results of tau2-bench: an object with "info" and "simulations"',
            recognises=benchmarks.is_tau2,
            read=benchmarks.read_tau2,
            metered=False,
        ),
        Format(
            name="verifiers",
            shape='an episode of verifiers ("task", "traces" with "nodes") or an object with "prompt" and "completion"',
            recognises=benchmarks.is_verifiers,
            read=benchmarks.read_verifiers,
            metered=False,
        ),
        Format(
            name="langsmith",
            shape='a run of LangSmith: an object with "run_type", "inputs" and "outputs"',
            recognises=langsmith.is_langsmith,
            read=langsmith.read,
            session=langsmith.session,
        ),
        Format(
            name="claude-code",
            shape='lines of a Claude Code session: objects with "type", "uuid" and "sessionId"',
            recognises=coding.is_claude_code,
            read=coding.read_claude_code,
            session=coding.claude_code_session,
        ),
        Format(
            name="codex",
            shape='lines of a Codex rollout: objects with "type" (session_meta, response_item) and "payload"',
            recognises=coding.is_codex,
            read=coding.read_codex,
            session=lambda record, file: file,
        ),
        Format(
            name="atif",
            shape='a trajectory in ATIF: an object with "schema_version" and "steps"',
            recognises=coding.is_atif,
            read=coding.read_atif,
        ),
        Format(
            name="swe-agent",
            shape='a trajectory of SWE-agent: an object with "trajectory" and "history"',
            recognises=coding.is_swe_agent,
            read=coding.read_swe_agent,
        ),
        Format(
            name="mini-swe-agent",
            shape='a trajectory of mini-swe-agent: an object with "messages" and "trajectory_format"',
            recognises=coding.is_mini_swe,
            read=coding.read_mini_swe,
        ),
        Format(
            name="smolagents",
            shape='the memory of a smolagents agent: "steps" with "step_number" and "task"',
            recognises=coding.is_smolagents,
            repeated=("model_input_messages", "model_output_message", "tool_calls"),
            read=coding.read_smolagents,
        ),
        Format(
            name="openhands",
            shape='events of OpenHands: objects with "source" and "action" or "observation"',
            recognises=coding.is_openhands,
            repeated=("model_response", "message"),
            read=coding.read_openhands,
            session=coding.openhands_session,
        ),
        Format(
            name="otel",
            shape='OTLP JSON: an object with "resourceSpans"',
            recognises=otel.recognises,
            read=otel.read,
            split=otel.spans,
            session=otel.session,
            metered=False,
        ),
        *(
            Format(name=name, shape=shape, recognises=chat.is_dialect(name), read=chat.read, session=chat.session)
            for name, shape in MESSAGES.items()
        ),
    )
}


def recognised(record: object) -> Format | None:
    """The format of a record; None: it is none of them."""
    for each in FORMATS.values():
        # A record that is not what it seems to be is no reason to stop.
        with contextlib.suppress(*UNREADABLE):
            if each.recognises(record):
                return each
    return None
