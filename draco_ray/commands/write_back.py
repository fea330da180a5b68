"""`draco write-back`: send verdicts and blamed steps to the service that the traces came from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from draco_ray.commands.grade import read_lines
from draco_ray.errors import ConfigError
from draco_ray.lab.analysis.pass_share import Line
from draco_ray.terminal import console, counted

SCORE_NAME = "pass share"
VERDICT_VALUES = {"PASS": 1.0, "FAIL": 0.0}
MAX_BATCH = 200
"""Maximum number of records in one request."""
Score = dict[str, Any]


def scores(lines: Sequence[Line]) -> Iterator[Score]:
    """Trace, name, value, label and explanation of each verdict that applies, and of each trace's pass share."""
    for line in lines:
        trace = line["trace_id"] or line["task_id"]
        if line["pass_share"] is not None:
            yield {"trace": trace, "name": SCORE_NAME, "value": line["pass_share"], "label": None, "why": ""}
        for verdict in line["verdicts"] or ():
            if (value := VERDICT_VALUES.get(verdict["verdict"])) is not None:
                steps = f" (step {', '.join(map(str, verdict['steps']))})" if verdict["steps"] else ""
                why = (verdict["explanation"] or verdict["justification"]) + steps
                yield {
                    "trace": trace,
                    "name": verdict["title"],
                    "value": value,
                    "label": verdict["verdict"],
                    "why": why,
                }


def langfuse(score: Score) -> dict[str, Any]:
    """A score for Langfuse's API. Its id makes Langfuse replace it when the same judgement is sent again."""
    number = hashlib.sha256(f"{score['trace']}\n{score['name']}".encode()).hexdigest()[:32]
    body = {"id": number, "traceId": score["trace"], "name": score["name"], "value": score["value"]}
    return body | {"dataType": "NUMERIC", "comment": score["why"]}


def phoenix(score: Score) -> dict[str, Any]:
    """A trace annotation for Phoenix's API."""
    return {
        "trace_id": score["trace"],
        "name": score["name"],
        "annotator_kind": "LLM",
        "identifier": "draco",
        "result": {"label": score["label"], "score": score["value"], "explanation": score["why"]},
    }


def otlp(score: Score) -> dict[str, Any]:
    """OpenTelemetry's event ``gen_ai.evaluation.result``, linked to the trace if the trace's id is 32 hex digits."""
    said = {
        "gen_ai.evaluation.name": {"stringValue": score["name"]},
        "gen_ai.evaluation.score.value": {"doubleValue": score["value"]},
        "gen_ai.evaluation.score.label": {"stringValue": (score["label"] or "").lower()},
        "gen_ai.evaluation.explanation": {"stringValue": score["why"]},
        "draco.trace_id": {"stringValue": score["trace"]},
    }
    record: dict[str, Any] = {
        "timeUnixNano": str(time.time_ns()),
        "eventName": "gen_ai.evaluation.result",
        "attributes": [{"key": key, "value": value} for key, value in said.items()],
    }
    return record | ({"traceId": score["trace"]} if re.fullmatch("[0-9a-f]{32}", score["trace"]) else {})


def _logs(records: list[dict[str, Any]]) -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "draco-ray"}}]}
    scoped = [{"scope": {"name": "draco_ray"}, "logRecords": records}]
    return {"resourceLogs": [{"resource": resource, "scopeLogs": scoped}]}


class Target(NamedTuple):
    """An API that takes scores."""

    path: str
    record: Callable[[Score], dict[str, Any]]
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """The body of a request with these records."""
    batch: int = MAX_BATCH


TARGETS = {
    "langfuse": Target("/api/public/scores", langfuse, lambda records: records[0], batch=1),
    "phoenix": Target("/v1/trace_annotations", phoenix, lambda records: {"data": records}),
    "otlp": Target("/v1/logs", otlp, _logs),
}


def write_back(judged: Path, target: str, url: str, *, dry_run: bool) -> None:
    """Send the verdicts of a judgement.

    Args:
        judged: directory of `draco judge`, or its judged.jsonl.
        target: one of `TARGETS`.
        url: address of the service, without the API's path.
        dry_run: print the requests instead of sending them.

    Raises:
        ConfigError: an unknown target, no judgement, a missing key, or a service that refuses.
    """
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: expected one of {', '.join(TARGETS)}")
    lines = read_lines(judged, "draco write-back")
    path, record, body, batch = TARGETS[target]
    records = list(map(record, scores(lines)))
    bodies = [body(records[start : start + batch]) for start in range(0, len(records), batch)]
    scored = f"{counted(len(records), 'score')} of {counted(len(lines), 'trace')}"
    if dry_run:
        for each in bodies:
            console.print(f"POST {url}{path} {json.dumps(each, ensure_ascii=False)}")
        console.print(f"{scored} not written to {target}; without --dry-run: {counted(len(bodies), 'request')}")
        return
    with httpx.Client(base_url=url, timeout=30.0, **_key(target)) as client:
        for sent, each in enumerate(bodies):
            try:
                reply = client.post(path, json=each)
            except httpx.HTTPError as error:
                raise ConfigError(
                    f"{target} at {url}: {type(error).__name__}: {error}; requests sent before: {sent}"
                ) from None
            if reply.is_error:
                said = " ".join(reply.text.split())[:200]
                raise ConfigError(
                    f"{target} at {url}{path}: status {reply.status_code}: {said}; requests sent before: {sent}"
                )
    console.print(f"{scored} written to {target} in {counted(len(bodies), 'request')}")


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
