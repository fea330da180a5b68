"""draco report --serve: who is answered, and a page that follows its run."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from draco_ray.cli import main
from draco_ray.errors import ConfigError
from draco_ray.lab.report.serving import ReportServer, state_of
from draco_ray.runs.store import RunStore
from tests.support.small_run import TASKS, small_run, write_group


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    with ReportServer(small_run(tmp_path / "small", steps=1), 0) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def test_the_page_follows_its_run(server: ReportServer, tmp_path: Path) -> None:
    before = httpx.get(server.url)
    state = httpx.get(f"{server.url}state").text
    assert f'data-live="{state}"' in before.text
    assert "connect-src 'self'" in before.text
    assert before.text.count('type="text/plain" id="g') == 4
    assert httpx.get(server.url).text == before.text
    store = RunStore(server.live._run)
    write_group(store, 2, TASKS[0])
    assert httpx.get(f"{server.url}state").text != state
    assert httpx.get(server.url).text.count('type="text/plain" id="g') == 5


@pytest.mark.parametrize(
    "path", ["/", "/state", "/{other}/", "/{other}/state", "/{token}x/", "/{token}/../", "/{token}/x", "//"]
)
def test_nobody_without_the_token_is_answered(server: ReportServer, path: str) -> None:
    path = path.format(token=server.token, other="A" * len(server.token))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 404
    assert server.token not in answer.read().decode()


def test_a_name_that_was_pointed_to_loopback_is_refused(server: ReportServer) -> None:
    for host, status in (("evil.example", 404), (f"evil.example:{server.server_port}", 404), ("", 404)):
        assert httpx.get(server.url, headers={"Host": host}).status_code == status
    assert httpx.get(server.url, headers={"Host": f"localhost:{server.server_port}"}).status_code == 200
    assert server.server_address[0] == "127.0.0.1"
    assert httpx.post(server.url).status_code == 501


def test_a_run_that_cannot_be_read_is_said_and_the_server_stays(server: ReportServer) -> None:
    metrics = server.live._run.metrics_file
    kept = metrics.read_bytes()
    metrics.write_text("{")
    answer = httpx.get(server.url)
    assert answer.status_code == 503
    assert "damaged" in answer.text
    metrics.write_bytes(kept)
    assert httpx.get(server.url).status_code == 200


def test_what_cannot_be_served_is_said(
    server: ReportServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "small"
    with pytest.raises(ConfigError, match="in use; choose another one"):
        ReportServer(server.live._run, server.server_port)
    for words in (["--out", "x"], ["--figures"], [str(run)]):
        with pytest.raises(SystemExit) as done:
            main(["report", str(run), "--serve", *words])
        assert done.value.code == 2
    assert capsys.readouterr().err.count("--serve: the page of one run") == 3


def test_the_state_is_of_what_the_page_shows(tmp_path: Path) -> None:
    run = small_run(tmp_path / "small", steps=1)
    state = state_of(run)
    (run.path / "report.html").write_text("x")
    (run.path / "judge_cache").mkdir(exist_ok=True)
    assert state_of(run) == state
    (run.path / "evaluations").mkdir()
    (run.path / "evaluations" / "new").write_text("x")
    assert state_of(run) != state
