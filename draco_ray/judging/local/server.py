"""One vLLM server of the judge model: started, monitored, restarted. Independent of Ray."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from draco_ray.config.schema import LOCAL_PROVIDER, EngineConfig, JudgeConfig, LocalJudgeConfig
from draco_ray.engine import openai_server
from draco_ray.engine.child import Child, Scrubber
from draco_ray.engine.model_directory import is_local
from draco_ray.errors import JudgeUnavailable
from draco_ray.judging.endpoint import Server
from draco_ray.judging.judge_context import model_positions
from draco_ray.judging.reply import THINK_BEGIN, THINK_END

MAX_FAILED_STARTS = 3
"""Maximum number of starts in a row that end before the server answers."""
LOOK_SECONDS = 5.0
"""Timeout of a health check, in seconds."""
CPU_CONTEXT = 8192
"""Context length on CPUs in tokens, if neither the configuration nor the model states one."""
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def served_model(model: str) -> str:
    """The model that vLLM loads for ``judge.model``: a hub name, or an absolute folder.

    >>> served_model("hosted_vllm/Qwen/Qwen3.6-27B")
    'Qwen/Qwen3.6-27B'
    """
    return model.removeprefix(LOCAL_PROVIDER)


def engine_of(local: LocalJudgeConfig) -> EngineConfig:
    """Engine settings of a server."""
    return EngineConfig(
        gpus_per_engine=local.gpus_per_replica,
        cpus_per_engine=local.cpus_per_replica,
        tensor_parallel=local.tensor_parallel,
        gpu_memory_utilization=local.gpu_memory_utilization,
        kv_cache_gib=local.kv_cache_gib,
        max_num_seqs=local.calls_per_replica,
    )


def serve_command(config: JudgeConfig, host: str, port: int) -> list[str]:
    """The command line of the server; it does not contain the API key."""
    local, model = config.local, served_model(config.model)
    context = local.context_tokens or (model_positions(model) if is_local(model) else None)
    words = [*openai_server.SERVER_COMMAND, "--model", model, "--served-model-name", model]
    words += ["--host", host, "--port", str(port), "--dtype", local.dtype, "--generation-config", "vllm"]
    words += [] if context is None else ["--max-model-len", str(context)]
    # Replies state the prompt tokens from the prefix cache. Progress is read from statistics, not from access logs.
    words += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    # No optional whitespace in replies that follow a schema.
    words += ["--structured-outputs-config", json.dumps({"disable_any_whitespace": True, "backend": "xgrammar"})]
    words += openai_server.hardware_arguments(engine_of(local), context or CPU_CONTEXT)
    return [*words, *reasoning_words(model, local.arguments), *local.arguments]


def reasoning_words(model: str, arguments: Sequence[str]) -> list[str]:
    """Arguments that let a thinking model reason freely up to ``</think>``, so that only the rest follows a schema.

    Args:
        model: hub name or directory. If it cannot be read here, vLLM reports why.
        arguments: ``judge.local.arguments``; a parser given there takes precedence.
    """
    if any(word.startswith("--reasoning-parser") for word in arguments):
        return []
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return []
    if tokenizer.chat_template is None or not {THINK_BEGIN, THINK_END} <= tokenizer.get_vocab().keys():
        return []

    def turn(**switch: bool) -> str:
        messages = [{"role": "user", "content": "Judge."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
        return str(text).rstrip()

    # The template of a hybrid model closes the reasoning only if thinking is disabled; by default the model thinks.
    hybrid = turn(enable_thinking=False).endswith(THINK_END) and not turn().endswith(THINK_END)
    thinks = hybrid or turn().endswith(THINK_BEGIN)
    return ["--reasoning-parser", "deepseek_r1"] if thinks else []


class VllmJudgeServer:
    """A `vllm serve` process and its API key."""

    def __init__(self, config: JudgeConfig, host: str, log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare a server; nothing is started before the first `look`.

        Args:
            config: model and resources.
            host: address of this node in the cluster.
            log: file for the server's output.
            clock: monotonic time in seconds; replaced by tests.
        """
        self._config, self._host, self._log, self._clock = config, host, log, clock
        self._key = secrets.token_urlsafe(24)
        self._child: Child | None = None
        self._base = ""
        self._began = clock()
        self._progress_at: float | None = None
        """Time of the last sign of progress; None until the server has answered."""
        self._tokens: float | None = None
        """Number of tokens that the server had read and written at `_progress_at`, if known."""
        self._failures = 0
        """Number of starts in a row that ended before the server answered."""

    @property
    def pid(self) -> int | None:
        """Process id of the server, if there is one."""
        return None if self._child is None else self._child.pid

    def look(self) -> Server | str:
        """Check the server, and start or restart it if needed; called regularly from one thread.

        Returns: the server if it serves, otherwise a phrase for its state, such as ``loads MODEL``.

        Raises:
            JudgeUnavailable: the server ended `MAX_FAILED_STARTS` times in a row before it answered, or did not answer
                in time.
        """
        child = self._child
        if child is None:
            return self._start()
        if child.returncode is not None:
            child.end()
            return self._again(child)
        return self._loading() if self._progress_at is None else self._watched(self._progress_at)

    def end(self) -> None:
        """End the server."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _start(self, why: str = "") -> str:
        self._base = f"http://{self._host}:{(port := openai_server.free_port(self._host))}"
        model = served_model(self._config.model)
        withheld = (self._config.key_variable,)
        environment = openai_server.server_env_vars(engine_of(self._config.local), model, self._key, withheld)
        words = serve_command(self._config, self._host, port)
        self._child = Child(
            words, environment, self._log, Scrubber([self._key]), temporary=openai_server.SOCKETS_VARIABLE
        )
        self._began, self._progress_at, self._tokens = self._clock(), None, None
        return f"loads {model}{why}"

    def _again(self, child: Child) -> str:
        """Restart a server that has ended."""
        self._child = None
        why = f"ended with exit code {child.returncode}"
        self._failures += self._progress_at is None
        if self._failures >= MAX_FAILED_STARTS:
            raise JudgeUnavailable(
                f"the judge's vLLM server of {served_model(self._config.model)} {why} {MAX_FAILED_STARTS} times before "
                f"it answered; last line of its output: {child.last_line[:200]} (see {self._log})"
            )
        return self._start(f", because the previous server {why}")

    def _loading(self) -> Server | str:
        local, model = self._config.local, served_model(self._config.model)
        with self._client(LOOK_SECONDS) as client:
            names = openai_server.served_names(client)
        seconds = self._clock() - self._began
        if names is not None:
            self._progress_at, self._failures = self._clock(), 0
            return self._serving()
        if seconds < local.start_timeout_seconds:
            return f"loads {model}"
        self.end()
        raise JudgeUnavailable(
            f"the judge's vLLM server of {model} did not answer within judge.local.start_timeout_seconds="
            f"{local.start_timeout_seconds:g}; see {self._log}"
        )

    def _watched(self, progress_at: float) -> Server | str:
        """Check a server that has answered; restart it if it hangs: no token for a while, and none when probed."""
        tokens, stall_seconds = self._all_tokens(), self._config.local.stall_seconds
        if tokens is not None and tokens != self._tokens:
            self._tokens, self._progress_at = tokens, self._clock()
        elif self._clock() - progress_at >= stall_seconds:
            if not self._answers():
                self.end()
                return self._start(
                    f", because the previous server produced no token for {stall_seconds:g} s, even when probed"
                )
            self._progress_at = self._clock()
        return self._serving()

    def _serving(self) -> Server:
        return Server(api_base=f"{self._base}/v1", key=self._key)

    def _all_tokens(self) -> float | None:
        with contextlib.suppress(httpx.HTTPError), self._client(LOOK_SECONDS) as client:
            return sum(float(count) for count in _TOKENS.findall(client.get("/metrics").text))
        return None

    def _answers(self) -> bool:
        request = {"model": served_model(self._config.model), "prompt": "OK", "max_tokens": 1}
        with contextlib.suppress(httpx.HTTPError), self._client(self._config.local.stall_seconds) as client:
            return client.post("/v1/completions", json=request).status_code == 200
        return False

    def _client(self, seconds: float) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._key}"}
        # No TLS here; otherwise httpx would read all certificates for every health check.
        return httpx.Client(base_url=self._base, headers=headers, timeout=seconds, trust_env=False, verify=False)
