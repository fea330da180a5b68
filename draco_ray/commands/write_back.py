"""`draco write-back`: send verdicts and blamed steps to the service that the traces came from."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from draco_ray.commands.grade import Line, read_lines
from draco_ray.errors import ConfigError
from draco_ray.terminal import counted

SHARE = "pass share"
VALUES = {"PASS": 1.0, "FAIL": 0.0}
BATCH = 200
"""Maximum number of annotations in one request."""
Request = tuple[str, dict[str, Any]]
"""Path and JSON body."""


def scores(lines: Sequence[Line]) -> Iterator[dict[str, Any]]:
    """Trace, name, value, label and explanation of each verdict that applies, and of each trace's pass share."""
    for line in lines:
        trace = line["trace_id"] or line["task_id"]
        if line["pass_share"] is not None:
            yield {"trace": trace, "name": SHARE, "value": line["pass_share"], "label": None, "why": ""}
        for verdict in line["verdicts"] or ():
            label = verdict["verdict"]
            if (value := VALUES.get(label)) is not None:
                steps = f" (step {', '.join(map(str, verdict['steps']))})" if verdict["steps"] else ""
                why = (verdict["explanation"] or verdict["justification"]) + steps
                yield {
                    "trace": trace,
                    "name": verdict["title"],
                    "value": value,
                    "label": verdict["verdict"],
                    "why": why,
                }


def langfuse(lines: Sequence[Line]) -> Iterator[Request]:
    """One request per score; writing the same judgement again replaces its scores."""
    for each in scores(lines):
        number = hashlib.sha256(f"{each['trace']}\n{each['name']}".encode()).hexdigest()[:32]
        body = {"id": number, "traceId": each["trace"], "name": each["name"], "value": each["value"]}
        yield "/api/public/scores", body | {"dataType": "NUMERIC", "comment": each["why"]}


def phoenix(lines: Sequence[Line]) -> Iterator[Request]:
    """Annotations of traces, at most `BATCH` per request."""
    data = [
        {
            "trace_id": each["trace"],
            "name": each["name"],
            "annotator_kind": "LLM",
            "identifier": "draco",
            "result": {"label": each["label"], "score": each["value"], "explanation": each["why"]},
        }
        for each in scores(lines)
    ]
    for start in range(0, len(data), BATCH):
        yield "/v1/trace_annotations", {"data": data[start : start + BATCH]}


def otlp(lines: Sequence[Line]) -> Iterator[Request]:
    """OpenTelemetry's events ``gen_ai.evaluation.result``, linked to a trace if its id is OpenTelemetry's."""
    records = []
    for each in scores(lines):
        said = {
            "gen_ai.evaluation.name": {"stringValue": each["name"]},
            "gen_ai.evaluation.score.value": {"doubleValue": each["value"]},
            "gen_ai.evaluation.score.label": {"stringValue": (each["label"] or "").lower()},
            "gen_ai.evaluation.explanation": {"stringValue": each["why"]},
            "draco.trace_id": {"stringValue": each["trace"]},
        }
        record: dict[str, Any] = {
            "timeUnixNano": str(time.time_ns()),
            "eventName": "gen_ai.evaluation.result",
            "attributes": [{"key": key, "value": value} for key, value in said.items()],
        }
        if re.fullmatch("[0-9a-f]{32}", each["trace"]):
            record["traceId"] = each["trace"]
        records.append(record)
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "draco-ray"}}]}
    for start in range(0, len(records), BATCH):
        part = [{"scope": {"name": "draco_ray"}, "logRecords": records[start : start + BATCH]}]
        yield "/v1/logs", {"resourceLogs": [{"resource": resource, "scopeLogs": part}]}


TARGETS: dict[str, Callable[[Sequence[Line]], Iterator[Request]]] = {
    "langfuse": langfuse,
    "phoenix": phoenix,
    "otlp": otlp,
}


def write_back(judged: Path, target: str, url: str, console: Console) -> None:
    """Send the verdicts of a judgement.

    Args:
        judged: directory of `draco judge`, or its judged.jsonl.
        target: one of `TARGETS`.
        url: address of the service, without the API's path.
        console: prints how much was sent.

    Raises:
        ConfigError: an unknown target, no judgement, a missing key, or a service that refuses.
    """
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: expected one of {', '.join(TARGETS)}")
    lines, sent = read_lines(judged, "draco write-back"), 0
    with httpx.Client(base_url=url, timeout=30.0, **_key(target)) as client:
        for path, body in TARGETS[target](lines):
            try:
                reply = client.post(path, json=body)
            except httpx.HTTPError as error:
                raise ConfigError(
                    f"{target} at {url}: {type(error).__name__}: {error}; requests sent before: {sent}"
                ) from None
            if reply.is_error:
                said = " ".join(reply.text.split())[:200]
                raise ConfigError(
                    f"{target} at {url}{path}: status {reply.status_code}: {said}; requests sent before: {sent}"
                )
            sent += 1
    written = f"{counted(len([*scores(lines)]), 'score')} of {counted(len(lines), 'trace')}"
    console.print(f"{written} written to {target} in {counted(sent, 'request')}")


def _key(target: str) -> dict[str, Any]:
    """Client options for authentication, from the service's usual variables. Raises: ConfigError: one is missing."""
    if target == "langfuse":
        names = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
        if missing := [name for name in names if not os.environ.get(name)]:
            raise ConfigError(f"--to langfuse: no API key found; set {' and '.join(missing)}")
        return {"auth": (os.environ[names[0]], os.environ[names[1]])}
    if target == "phoenix":
        key = os.environ.get("PHOENIX_API_KEY")
        return {"headers": {"Authorization": f"Bearer {key}"}} if key else {}
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if pair)
    return {"headers": {name.strip(): value.strip() for name, _, value in pairs}}
