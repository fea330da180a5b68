"""`engine.vllm`: what may be handed to vLLM, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from draco_ray.config.keys import dotted_keys
from draco_ray.config.load import dump_config, load_config
from draco_ray.config.schema import EngineConfig, ModelConfig
from draco_ray.config.vllm_arguments import RESERVED_ARGUMENTS
from draco_ray.engine.openai_server import server_env_vars
from draco_ray.engine.vllm_engine import vllm_env_vars
from draco_ray.errors import ConfigError
from draco_ray.lab.planning.memory import GIB, engine_memory
from draco_ray.lab.planning.model_shape import model_shape
from draco_ray.training.resume import config_changes


def test_it_is_part_of_the_configuration_and_of_what_a_resumed_run_compares(tmp_path: Path) -> None:
    config = load_config("qwen3.6-27b", ["engine.vllm={kv_cache_dtype: fp8}", "engine.vllm.block_size=64"])
    assert config.engine.vllm == {"kv_cache_dtype": "fp8", "block_size": 64}
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(str(file)) == config
    assert config_changes(load_config("qwen3.6-27b"), config)


@pytest.mark.parametrize(("name", "instead"), RESERVED_ARGUMENTS.items())
def test_what_a_key_says_already_is_refused_and_the_key_named(name: str, instead: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^config key engine.vllm: .*{name} cannot be set here; set {instead} instead"
    ) as refused:
        load_config("qwen3.6-27b", [f"engine.vllm.{name}=1"])
    assert "\n" not in str(refused.value)
    assert all(key in dotted_keys() for part in instead.split(" and ") for key in part.split(", "))


@pytest.mark.parametrize(
    ("preset", "argument", "problem"),
    [
        ("qwen3.6-27b", "enable_lora=false", "enable_lora cannot be changed, because the engine depends on its value"),
        ("qwen3.6-27b", "logprobs_mode=raw_logits", "logprobs_mode cannot be changed"),
        (
            "sandbox",
            "enable_chunked_prefill=true",
            "enable_chunked_prefill cannot be changed on the CPU, because the engine",
        ),
        ("sandbox", "worker_cls=a.B", "worker_cls cannot be changed on the CPU"),
        (
            "qwen3.6-27b",
            "speculative_config={method: ngram, rejection_sample_method: synthetic}",
            "rejection_sample_method=synthetic does not sample from the policy",
        ),
    ],
)
def test_what_the_engine_is_built_on_is_refused(preset: str, argument: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^config key engine.vllm: .*{problem}") as refused:
        load_config(preset, [f"engine.vllm.{argument}"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["fp8", "[1]", "7", "{1: 2}"])
def test_it_is_a_mapping_of_names(value: str) -> None:
    with pytest.raises(ConfigError, match="engine.vllm") as refused:
        load_config("qwen3.6-27b", [f"engine.vllm={value}"])
    assert "\n" not in str(refused.value)


def test_a_gpu_engine_may_be_told_how_long_its_passes_are() -> None:
    shape = model_shape("Qwen/Qwen3.6-27B")

    def workspace(gpu: int, *overrides: str) -> int:
        memory = engine_memory(load_config("qwen3.6-27b", overrides), shape, gpu * GIB, 0)
        return next(item.bytes for item in memory.items if item.name.startswith("workspace"))

    small = workspace(80, "engine.vllm.max_num_batched_tokens=2048")
    # As vLLM does without being told: 16,384 on a GPU of 70 GiB, 8,192 on a smaller one.
    token = 2 * (4 * shape.hidden + 3 * shape.intermediate // 2)
    assert workspace(80) - small == (16384 - 2048) * token
    assert workspace(48) - small == (8192 - 2048) * token


def test_a_kv_cache_of_eight_bits_takes_half() -> None:
    shape = model_shape("Qwen/Qwen2.5-32B-Instruct")

    def sequence(*overrides: str) -> int:
        return engine_memory(load_config("qwen2.5-32b", overrides), shape, 80 * GIB, 0).sequence

    assert sequence("engine.vllm.kv_cache_dtype=fp8") * 2 == sequence()


@pytest.mark.parametrize("own", [None, "1"])
def test_nothing_is_compiled_at_the_first_start_that_needs_a_cuda_toolkit(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image has no nvcc, and an environment that is not activated no ninja on the PATH: vLLM's core died of it."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    on_gpu, on_cpu = EngineConfig(gpus_per_engine=1), EngineConfig(gpus_per_engine=0)
    for environment in (
        vllm_env_vars(on_gpu, ModelConfig(path="Qwen/Qwen3.6-27B")),
        server_env_vars(on_gpu, "Qwen/Qwen3.6-27B", "key"),
    ):
        assert environment[name] == (own or "0")
    assert name not in vllm_env_vars(on_cpu, ModelConfig(path="Qwen/Qwen3.6-27B"))
