"""Verdicts go back to tracing services; each is a real HTTP server here, which takes what its API takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draco_ray.cli import main

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Service:
    """Keeps what is posted; answers with ``status``."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any], str | None]] = []
        self.status = 200
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.posted.append((self.path, body, self.headers.get("Authorization")))
                self.send_response(service.status)
                self.end_headers()
                self.wfile.write(b"no such project")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    found = Service()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    def verdict(title: str, said: str, *steps: int) -> dict[str, object]:
        return {"title": title, "verdict": said, "steps": steps, "explanation": "because", "justification": ""}

    verdicts = [
        verdict("Books it", "PASS", 2),
        verdict("Asks first", "FAIL", 1, 3),
        verdict("Cancels", "NOT_APPLICABLE"),
    ]
    line = {"task_id": "t", "trace_id": TRACE, "pass_share": 0.5, "verdicts": verdicts, "source": "x:1", "error": None}
    (tmp_path / "judged.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


def write(judged: Path, to: str, url: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["write-back", str(judged), "--to", to, "--url", url])
    assert end.value.code in (0, None)


def test_langfuse_has_a_score_for_each_verdict(judged: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    write(judged, "langfuse", service.url)
    assert {path for path, _, _ in service.posted} == {"/api/public/scores"}
    assert {sent for _, _, sent in service.posted} == {"Basic cGs6c2s="}
    bodies = {body["name"]: body for _, body, _ in service.posted}
    assert {name: body["value"] for name, body in bodies.items()} == {"pass share": 0.5, "Books it": 1, "Asks first": 0}
    assert bodies["Asks first"]["comment"] == "because (step 1, 3)"
    assert bodies["Asks first"]["traceId"] == TRACE
    first = [body["id"] for _, body, _ in service.posted]
    write(judged, "langfuse", service.url)
    assert [body["id"] for _, body, _ in service.posted][3:] == first, "written again, a score replaces itself"


def test_phoenix_has_annotations(judged: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOENIX_API_KEY", "key")
    write(judged, "phoenix", service.url)
    ((path, body, sent),) = service.posted
    assert (path, sent) == ("/v1/trace_annotations", "Bearer key")
    assert {each["trace_id"] for each in body["data"]} == {TRACE}
    assert body["data"][2]["result"] == {"label": "FAIL", "score": 0.0, "explanation": "because (step 1, 3)"}


def test_opentelemetry_has_evaluation_events_within_the_trace(judged: Path, service: Service) -> None:
    write(judged, "otlp", service.url)
    ((path, body, _),) = service.posted
    assert path == "/v1/logs"
    records = body["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    assert {(each["eventName"], each["traceId"]) for each in records} == {("gen_ai.evaluation.result", TRACE)}
    said = {each["key"]: each["value"] for each in records[2]["attributes"]}
    assert said["gen_ai.evaluation.name"] == {"stringValue": "Asks first"}
    assert said["gen_ai.evaluation.score.label"] == {"stringValue": "fail"}


def test_a_dry_run_prints_the_requests_and_sends_nothing(
    judged: Path, service: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    with pytest.raises(SystemExit, match="0"):
        main(["write-back", str(judged), "--to", "langfuse", "--url", service.url, "--dry-run"])
    *requests, end = capsys.readouterr().out.splitlines()
    assert end == "3 scores of 1 trace not written to langfuse; without --dry-run: 3 requests"
    bodies = [json.loads(line.removeprefix(f"POST {service.url}/api/public/scores ")) for line in requests]
    assert [body["name"] for body in bodies] == ["pass share", "Books it", "Asks first"]
    assert service.posted == []


@pytest.mark.parametrize(
    ("to", "said"), [("langsmith", "expected one of langfuse, phoenix, otlp"), ("langfuse", "set LANGFUSE_PUBLIC_KEY")]
)
def test_what_cannot_be_sent_is_one_line(
    judged: Path, to: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["write-back", str(judged), "--to", to, "--url", "http://127.0.0.1:9"])
    assert said in capsys.readouterr().err


def test_a_service_that_refuses_is_quoted(judged: Path, service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.status = 404
    with pytest.raises(SystemExit, match="2"):
        main(["write-back", str(judged), "--to", "phoenix", "--url", service.url])
    error = capsys.readouterr().err
    assert "status 404: no such project; requests sent before: 0" in error
    assert error.count("\n") == 1
