"""Configuration of τ-bench: the section ``tau_bench``, and `Tau2Config`, which the environment ``tau`` also uses."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from draco_ray.config.schema import CONFIRMED, CONFIRMED_URL, ConfigSection, DracoConfig, NonEmptyStr

DenseRetrieval = Literal["alltools-qwen", "qwen_embeddings", "qwen_embeddings_grep"]
"""tau2's retrieval configurations that call an embedding model."""
NoEmbedding = Literal["terminal_use", "bm25", "bm25_grep", "grep_only", "full_kb", "golden_retrieval", "no_knowledge"]
"""tau2's retrieval configurations that call no embedding model."""


class Tau2Config(ConfigSection):
    """An installation of tau2-bench."""

    tau2_python: str | None = Field(None, json_schema_extra=CONFIRMED)
    """Python that can import tau2; null: TAU2_PYTHON, else .venv/bin/python of tau2_home."""
    tau2_home: Path | None = Field(None, json_schema_extra=CONFIRMED)
    """Checkout of tau2-bench, for its data; null: TAU2_HOME."""
    tau2_version: str = "1.0.1"
    """Required version of tau2; tasks and grading differ between versions."""


class TauModelConfig(ConfigSection):
    """A model that tau2 calls through LiteLLM."""

    model: str = Field("openai/gpt-5.4", json_schema_extra=CONFIRMED_URL)
    """LiteLLM model name with provider prefix."""
    api_base: NonEmptyStr | None = Field(None, json_schema_extra=CONFIRMED)
    """Endpoint; null: the provider's own. For agent and user simulator, only with openai/ and hosted_vllm/ models."""
    api_key_env: NonEmptyStr | None = Field(None, json_schema_extra=CONFIRMED)
    """Environment variable with the key; null: ``<PROVIDER>_API_KEY``. For providers other than openai/ and
    hosted_vllm/ it must be the name that LiteLLM reads."""
    temperature: float | None = Field(0.0, ge=0)
    """Temperature of sampling; null: not sent."""


class TauEmbedderConfig(ConfigSection):
    """The embedding model behind dense retrieval (alltools-qwen)."""

    model: str = "qwen/qwen3-embedding-8b"
    """The model's name at the endpoint."""
    api_base: NonEmptyStr = Field("https://openrouter.ai/api/v1", json_schema_extra=CONFIRMED)
    """Endpoint of the embedding model."""
    api_key_env: NonEmptyStr = Field("OPENROUTER_API_KEY", json_schema_extra=CONFIRMED)
    """Environment variable with the API key of this endpoint."""


class TauServerConfig(ConfigSection):
    """vLLM's OpenAI-compatible server for the policy; GPUs, memory and sequence limits come from `engine`."""

    port: int | None = Field(None, ge=1, le=65535)
    """Port on 127.0.0.1; null: a free one."""
    max_model_len: int = Field(131072, ge=1024)
    """Maximum tokens of prompt and reply (appendix "Serving configuration")."""
    native_context: int | None = Field(None, ge=1024)
    """Context length, in tokens, that the model was trained for; YaRN extends it to max_model_len. null reads a local
    model's config.json."""
    tool_call_parser: str | None = None
    """vLLM's tool parser; null: derived for Qwen models."""
    reasoning_parser: str | None = None
    """vLLM's reasoning parser; null: derived for Qwen models."""
    start_timeout_seconds: float = Field(1800.0, gt=0)
    """Time limit for the server to load the model."""


class TauBenchConfig(Tau2Config):
    """τ-bench banking, run by tau2-bench in an environment of its own (docs/tau_bench.md)."""

    retrieval: Literal[DenseRetrieval, NoEmbedding] = "alltools-qwen"
    """tau2's retrieval configuration; the default is the paper's all-tools setting with Qwen embeddings."""
    tasks: tuple[str, ...] | None = None
    """Only these task ids, for a trial; null: the full split of 97, as in the paper's figures."""
    trials: int = Field(3, ge=1)
    """Episodes per task: the n of pass^k."""
    max_turns: int = Field(100, ge=1)
    """Maximum agent turns; tau2 counts two steps per turn."""
    seed: int = Field(300, ge=0, lt=2**32)
    """Random seed of tau2's episodes."""
    concurrency: int = Field(8, ge=1)
    """Maximum number of concurrent episodes."""
    episode_retries: int = Field(3, ge=0)
    """Retries of an episode that ended in an exception."""
    episode_timeout_seconds: float | None = Field(None, gt=0)
    """Time limit of an episode; it then fails."""
    stall_timeout_seconds: float = Field(3600.0, gt=0)
    """Time without a finished episode after which tau2's process is restarted."""
    restarts: int = Field(3, ge=0)
    """Maximum restarts of tau2's process after it died or stalled; finished episodes are kept."""
    embeddings_cache: Path = Field(Path(".cache/tau2_embeddings"), json_schema_extra=CONFIRMED)
    """Folder of the documents' embeddings."""
    agent: TauModelConfig = TauModelConfig()
    """The policy if it is an API model; for a policy served here only the temperature is used."""
    user: TauModelConfig = TauModelConfig()
    """The user simulator."""
    judge: TauModelConfig = TauModelConfig()
    """Judge of natural-language assertions, which decide the result of one task."""
    embedder: TauEmbedderConfig = TauEmbedderConfig()
    server: TauServerConfig = TauServerConfig()

    @classmethod
    def of(cls, config: DracoConfig) -> Self:
        """The section ``tau_bench`` of a configuration."""
        assert isinstance(config.tau_bench, cls)
        return config.tau_bench
