"""One vLLM server of the judge model, for which a small HTTP server answers: what it is started with, and replaced."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.engine import openai_server
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.endpoint import Server
from draco_ray.judging.local import server as module
from draco_ray.judging.local.server import MAX_FAILED_STARTS, VllmJudgeServer, serve_command

MODEL = "hosted_vllm/Qwen/Qwen3.6-27B"
METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="judge"} %s
vllm:generation_tokens_total{engine="0",model_name="judge"} 2.0
vllm:num_requests_running{engine="0"} 7.0
"""


class Answers(ThreadingHTTPServer):
    """What `vllm serve` says of itself, as the test sets it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.loaded = False
        self.tokens = 40.0
        self.completes = True
        self.go_on = threading.Event()
        """Cleared: it hangs."""
        self.go_on.set()
        self.asked: list[tuple[str, str | None]] = []
        """Paths, and the keys that came with them."""
        self.completions: list[object] = []

    def handle_error(self, *_: object) -> None:
        """Nothing: whoever asked waits no longer."""


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        metrics = self.path == "/metrics"
        body = METRICS % self.server.tokens if metrics else json.dumps({"data": [{"id": "judge"}]})
        self._answer(200 if metrics or self.server.loaded else 503, body)

    def do_POST(self) -> None:
        self.server.completions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(200 if self.server.completes else 500, "{}")

    def _answer(self, status: int, body: str) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        # At most so long: code that waits for ever fails, and does not hang.
        self.server.go_on.wait(60)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    # That a proxy is set is nothing to a server on this cluster.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Answers() as answers:
        thread = threading.Thread(target=answers.serve_forever, args=(0.01,))
        thread.start()
        yield answers
        answers.go_on.set()
        answers.shutdown()
        thread.join()


class Watched:
    """`VllmJudgeServer` on a clock of the test's own, with a process that only sleeps."""

    def __init__(self, folder: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 500.0
        self.log = folder / "server.log"
        self.command = ["sleep", "600"]
        port = answers.server_address[1]
        monkeypatch.setattr(openai_server, "free_port", lambda host: {"127.0.0.1": port}[host])

        def words(config: JudgeConfig, host: str, asked: int) -> list[str]:
            assert (config.model, host, asked) == (MODEL, "127.0.0.1", port)
            return self.command

        monkeypatch.setattr(module, "serve_command", words)
        local = {"enabled": True, "stall_seconds": 60, "start_timeout_seconds": 100}
        local |= {"gpus_per_replica": 0, "cpus_per_replica": 3}
        config = JudgeConfig.model_validate({"model": MODEL, "api_key_env": "ITS_KEY", "local": local})
        self.server = VllmJudgeServer(config, "127.0.0.1", self.log, lambda: self.now)

    def look(self, later: float = 0.0) -> Server | str:
        self.now += later
        return self.server.look()

    def wait(self) -> None:
        """Until its process has ended."""
        assert self.server._child is not None
        assert self.server._child.wait(600) is not None


@pytest.fixture
def watched(tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(tmp_path, answers, monkeypatch)
    yield watched
    watched.server.end()
    assert watched.server.pid is None


def test_it_loads_until_it_names_its_models_and_is_reached_with_its_own_key(
    watched: Watched, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ITS_KEY", "the hosted judge's")
    assert watched.server.pid is None
    assert watched.look() == "loads Qwen/Qwen3.6-27B"
    assert watched.look(later=7) == "loads Qwen/Qwen3.6-27B"
    answers.loaded = True
    found = watched.look(later=1)
    assert isinstance(found, Server)
    assert found.api_base == f"http://127.0.0.1:{answers.server_address[1]}/v1"
    assert answers.asked == [("/v1/models", f"Bearer {found.key}")] * 2
    environment = Path(f"/proc/{watched.server.pid}/environ").read_text(encoding="utf-8").split("\0")
    assert f"VLLM_API_KEY={found.key}" in environment
    assert "OMP_NUM_THREADS=3" in environment
    assert not [each for each in environment if each.startswith("ITS_KEY=")]
    assert len(found.key) >= 24
    assert watched.look() == found


def test_one_that_makes_no_token_is_asked_for_one_and_replaced_if_it_makes_none(
    watched: Watched, answers: Answers
) -> None:
    answers.loaded = True
    watched.look()
    watched.look()
    pid = watched.server.pid
    assert isinstance(watched.look(later=59), Server)
    assert isinstance(watched.look(later=0.5), Server)
    answers.tokens += 1
    # What it has read and written is more: the time begins anew.
    assert isinstance(watched.look(later=1), Server)
    assert isinstance(watched.look(later=59), Server)
    assert answers.completions == []
    assert isinstance(watched.look(later=1), Server)
    question = {"model": "Qwen/Qwen3.6-27B", "prompt": "OK", "max_tokens": 1}
    assert answers.completions == [question]
    # It has made that one, though nothing else was asked of it.
    assert isinstance(watched.look(later=59), Server)
    assert answers.completions == [question]
    assert watched.server.pid == pid
    answers.completes = answers.loaded = False
    again = watched.look(later=1)
    assert again == ("loads Qwen/Qwen3.6-27B, because the previous server produced no token for 60 s, even when probed")
    assert answers.completions == [question] * 2
    assert watched.server.pid not in (None, pid)
    # The new one loads as the first did, and has its own time for that.
    assert watched.look(later=99) == "loads Qwen/Qwen3.6-27B"


def test_one_that_hangs_is_waited_for_no_longer_than_it_may_take(
    watched: Watched, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(yes: bool) -> None:
        """It answers at its leisure, or never; then a short limit spares time."""
        (answers.go_on.clear if yes else answers.go_on.set)()
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.05 if yes else 30)

    local = watched.server._config.local.model_copy(update={"stall_seconds": 0.1})
    watched.server._config = watched.server._config.model_copy(update={"local": local})
    answers.loaded = True
    watched.look()
    hangs(True)
    assert str(watched.look()).startswith("loads")
    hangs(False)
    assert isinstance(watched.look(), Server)
    hangs(True)
    assert isinstance(watched.look(later=0.05), Server)
    assert str(watched.look(later=0.05)).startswith(
        "loads Qwen/Qwen3.6-27B, because the previous server produced no token for 0.1 s"
    )
    assert [path for path, _ in answers.asked] == ["/v1/models"] * 2 + ["/metrics"] * 2 + ["/v1/completions"]


def test_only_ends_in_a_row_before_an_answer_count(watched: Watched, answers: Answers) -> None:
    fails, sleeps = ["sh", "-c", "printf '%s is the key %0300d\\n' $VLLM_API_KEY 0; exit 3"], watched.command
    loads = "loads Qwen/Qwen3.6-27B, because the previous server ended with exit code 3"
    watched.command = fails
    watched.look()
    for command in [fails] * (MAX_FAILED_STARTS - 2) + [sleeps]:
        watched.wait()
        watched.command = command
        assert watched.look() == loads
    answers.loaded = True
    assert isinstance(watched.look(), Server)
    assert watched.server._child is not None
    watched.server._child.end()
    watched.command = fails
    assert watched.look() == "loads Qwen/Qwen3.6-27B, because the previous server ended with exit code -15"
    for _ in range(MAX_FAILED_STARTS - 1):
        watched.wait()
        assert watched.look() == loads
    watched.wait()
    with pytest.raises(JudgeUnavailable) as refusal:
        watched.look()
    said = "*** is the key " + "0" * 300
    assert str(refusal.value) == (
        "the judge's vLLM server of Qwen/Qwen3.6-27B ended with exit code 3 3 times before it answered; last line of "
        f"its output: {said[:200]} (see {watched.log})"
    )
    assert watched.log.read_text(encoding="utf-8") == f"{said}\n" * (2 * MAX_FAILED_STARTS - 1)
    assert watched.server.pid is None


def words_of(config: dict[str, object], model: str = MODEL) -> list[str]:
    judge = JudgeConfig.model_validate({"model": model, "local": {"enabled": True, **config}})
    return serve_command(judge, "10.0.0.7", 8123)


def test_the_whole_command_line_on_a_gpu() -> None:
    config = {"calls_per_replica": 16, "tensor_parallel": 2, "gpus_per_replica": 2, "gpu_memory_utilization": 0.8}
    model = "--model Qwen/Qwen3.6-27B --served-model-name Qwen/Qwen3.6-27B --host 10.0.0.7 --port 8123"
    assert words_of({**config, "dtype": "bfloat16", "context_tokens": 65536, "arguments": ["--seed", "1"]}) == [
        *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *model.split()),
        *("--dtype", "bfloat16", "--generation-config", "vllm", "--max-model-len", "65536"),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *("--structured-outputs-config", '{"disable_any_whitespace": true, "backend": "xgrammar"}'),
        *("--tensor-parallel-size", "2", "--max-num-seqs", "16"),
        *("--distributed-executor-backend", "draco_ray.engine.executor.AttachedMultiprocExecutor"),
        *("--gpu-memory-utilization", "0.8", "--seed", "1"),
    ]


@pytest.mark.parametrize(("context", "said", "batched"), [(None, "2048", "8192"), (16384, "16384", "16384")])
def test_on_a_cpu_the_context_is_the_models_where_none_is_configured(
    tmp_path: Path, context: int | None, said: str, batched: str
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}', encoding="utf-8")
    words = words_of({"gpus_per_replica": 0, "kv_cache_gib": 0.5, "context_tokens": context}, f"hosted_vllm/{tmp_path}")
    after = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
    assert (after["--max-model-len"], after["--max-num-batched-tokens"]) == (said, batched)
    assert after["--kv-cache-memory-bytes"] == str(2**29)


def test_a_model_of_the_hub_says_its_context_when_it_is_loaded() -> None:
    words = words_of({"gpus_per_replica": 0})
    assert "--max-model-len" not in words
    assert words[words.index("--max-num-batched-tokens") + 1] == "8192"
