"""`draco plan`: what it prints, what it refuses, and the formulas that need no model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from draco_ray.cli import main
from draco_ray.commands import plan
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.model_config import PUBLIC_CONFIGS
from draco_ray.errors import ConfigError
from draco_ray.judging.judge_context import self_judge_context_length
from draco_ray.lab.planning.memory import (
    GIB,
    LearnerMemory,
    base_parameters,
    engine_memory,
    exchanged_bytes,
    kv_bytes,
    learner_memory,
    micro_batch_tokens,
    recurrent_state_bytes,
)
from draco_ray.lab.planning.model_shape import ModelShape, model_shape, read_shape
from draco_ray.lab.planning.step_time import Assumptions, assumptions, learner_flops, step_time

QWEN30 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
"""Of Qwen3-30B-A3B's config.json what decides its size."""
QWEN27, QWEN32 = "Qwen/Qwen3.6-27B", "Qwen/Qwen2.5-32B-Instruct"


def shape_of(name: str) -> ModelShape:
    return model_shape(name)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *words])
    assert exit_.value.code != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *words])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_public_models_have_their_published_sizes() -> None:
    """32.8B and 27.8B by their checkpoints, the latter with vision tower and prediction layer (0.9B)."""
    assert shape_of(QWEN32).parameters == 32_763_876_352
    assert shape_of(QWEN27).parameters == 26_895_998_464
    assert shape_of(QWEN27).count("linear_attention") == 48


@pytest.mark.parametrize("name", PUBLIC_CONFIGS)
def test_the_committed_shapes_are_those_of_the_models_that_transformers_builds(name: str) -> None:
    assert model_shape(name) == read_shape(PUBLIC_CONFIGS[name], name)


def test_a_public_model_is_planned_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from draco_ray.cli import main; main(['plan', *sys.argv[1:]])"
    )
    said = subprocess.run([sys.executable, "-c", code, "qwen2.5-32b"], capture_output=True, text=True, check=True)
    assert "32,763,876,352 parameters" in said.stdout


def test_a_mixture_of_experts_is_counted_whole_where_it_is_kept_and_by_a_token_s_experts_where_it_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """30.5B and 3.3B by its model card."""
    shape = read_shape(QWEN30, "config.json")
    assert shape.parameters == 30_532_122_624
    assert shape.active_parameters == 3_353_032_704
    # All but the embedding (and norms) is multiplied with.
    assert shape.matrix_parameters + 2 * 151936 * 2048 == pytest.approx(shape.active_parameters, rel=1e-3)
    assert shape.adapter_parameters("all-linear", 16) == 16 * 48 * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)
    # One sequence reads its own eight experts, many together nearly all of the 128.
    assert shape.read_parameters(1) == pytest.approx(shape.matrix_parameters)
    everything = shape.parameters - 2 * 151936 * 2048
    assert 0.96 * everything < shape.read_parameters(64) < everything

    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN30))
    words = ("qwen3.6-27b", "model.path=Qwen/Qwen3-30B-A3B", "--model-config", str(file))
    output = printed(capsys, *words)
    said = (
        "30,532,122,624 parameters, 3,353,032,704 of them active (8 of 128 experts), in 48 layers; adapter of rank 16: "
    )
    assert said in output
    config = load_config("qwen3.6-27b", ["model.path=Qwen/Qwen3-30B-A3B"])
    assert engine_memory(config, shape, 80 * GIB, 0).items[0].bytes == shape.parameters
    assert base_parameters(config, shape) == pytest.approx(shape.parameters / 4, rel=1e-3)
    assert "all-linear, which means self_attn.q_proj" in refused(capsys, *words, "learner.lora_target='.*_proj'")
    dense = dataclasses.replace(shape, experts=None)
    assert learner_flops(config, shape, length=4096, sampled_share=0.5) < 2 * learner_flops(
        config, dense, length=4096, sampled_share=0.5
    )


@pytest.mark.parametrize("preset", ["qwen3.6-27b", "qwen2.5-32b"])
def test_a_preset_fits_into_80_gib_because_the_base_is_sharded(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, preset)
    for kind in ("base weights", "adapter", "optimizer", "gradients", "log-prob chunk", "KV cache", "engine weights"):
        assert kind in output
    for part in ("1/4 of the base", "two layers, gathered", "generation", "learning", "sync"):
        assert part in output
    error = refused(capsys, preset, "learner.sharding=none")
    assert "the largest item is base weights" in error
    assert "set learner.sharding=full" in error
    output = printed(capsys, preset, "learner.sharding=none", "--gpu-memory-gib", "140")
    assert "each with the whole base" in output
    assert "gathered" not in output


def test_the_tokens_that_would_fit_do_fit(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ("--gpu-memory-gib", "36")
    with pytest.raises(SystemExit):
        main(["plan", "qwen3.6-27b", *gpu])
    tokens = int(capsys.readouterr().out.split("that would fit")[1].split()[0].replace(",", ""))
    response = f"agent.max_response_length={tokens - 4096}"
    printed(capsys, "qwen3.6-27b", response, f"learner.micro_batch_tokens={tokens}", *gpu)
    refused(capsys, "qwen3.6-27b", response, f"learner.micro_batch_tokens={tokens + 100}", *gpu)


@pytest.mark.parametrize(
    ("overrides", "gpu", "named"),
    [
        (["learner.gradient_checkpointing=false"], "140", "learner.gradient_checkpointing=true"),
        (["learner.micro_batch_tokens=65536"], "80", "set learner.micro_batch_tokens="),
        (["learner.logprob_chunk_tokens=32768"], "80", "set learner.logprob_chunk_tokens="),
        (["model.dtype=float32"], "80", "set model.dtype=bfloat16"),
        (["learner.sharding=none"], "80", "set learner.sharding=full"),
        (["learner.workers=1"], "80", "set learner.sharding=full and learner.workers=2"),
        ([], "40", "set learner.context_parallel=2"),
        (["agent.max_response_length=100000"], "80", "set learner.context_parallel=2"),
        (["learner.sharding=none", "model.dtype=float32"], "40", "use GPUs with more memory"),
        (["engine.tensor_parallel=1", "engine.gpus_per_engine=1"], "60", "raise engine.tensor_parallel"),
        (["engine.kv_cache_gib=0.5"], "140", "raise engine.kv_cache_gib"),
    ],
)
def test_a_refusal_names_the_key_to_change(
    overrides: list[str], gpu: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(capsys, "qwen3.6-27b", *overrides, "--gpu-memory-gib", gpu)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["engine.tensor_parallel=5", "engine.gpus_per_engine=5"],
            "(num_attention_heads=24); expected one of 1, 2, 4, 8",
        ),
        (["engine.tensor_parallel=3", "engine.gpus_per_engine=3"], "(num_key_value_heads=4); expected one of"),
        (["engine.gpus_per_engine=1"], "but engine.gpus_per_engine=1"),
        (["model.path=somebody/unknown"], "--model-config FILE"),
        (["learner.lora_target=nothing"], "learner.lora_target"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    overrides: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refused(capsys, "qwen3.6-27b", *overrides, "--gpu-memory-gib", "140")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        (
            "seed=0",
            "the largest item is base weights (50.10 GiB): change model.path, or use a machine",
        ),
        ("engine.kv_cache_gib=90", "the largest item is KV cache (90.00 GiB): change engine.kv_cache_gib"),
        ("learner.gradient_checkpointing=false", "set learner.gradient_checkpointing=true"),
    ],
)
def test_a_machine_without_the_memory_is_told_what_takes_most_of_it(
    override: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "memory_bytes", lambda: (120 if "checkpointing" in override else 100) * GIB)
    assert named in refused(capsys, "cpu", f"model.path={QWEN27}", "model.dtype=bfloat16", override)


def test_a_name_that_vllm_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert "did you mean kv_cache_dtype" in refused(capsys, "qwen3.6-27b", "engine.vllm={kv_cache_dtyp: fp8}")


def test_a_model_that_is_not_known_is_planned_from_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": PUBLIC_CONFIGS[QWEN27]}), encoding="utf-8")
    words = ("qwen3.6-27b", "model.path=somebody/unknown", "--gpu-memory-gib", "140", "--model-config", str(file))
    assert "26,895,998,464 parameters" in printed(capsys, *words)
    file.write_text(json.dumps({"model_type": "qwen2", "hidden_size": 64}), encoding="utf-8")
    assert "num_hidden_layers is None" in refused(capsys, *words)
    file.write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    assert "n_layer is None" in refused(capsys, *words)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    for unknown in ({"model_type": "nothing"}, {}, {"model_type": "clip_text_model"} | sizes):
        file.write_text(json.dumps(unknown), encoding="utf-8")
        assert "cannot build a language model of model_type" in refused(capsys, *words)
    file.write_text(json.dumps(PUBLIC_CONFIGS[QWEN32] | {"hidden_act": "nothing"}), encoding="utf-8")
    assert "cannot build a language model of model_type 'qwen2'" in refused(capsys, *words)


GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
FALCON = {
    "model_type": "falcon",
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "parallel_attn": True,
}


@pytest.mark.parametrize(
    ("config", "parameters", "kv_heads", "adapted"),
    [
        (GPT2, 124_439_808, 12, {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        (
            FALCON,
            6_921_720_704,
            1,
            {
                *("self_attention.query_key_value", "self_attention.dense"),
                *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            },
        ),
    ],
)
def test_models_that_name_their_parts_otherwise_are_counted_too(
    config: dict[str, object], parameters: int, kv_heads: int, adapted: set[str], tmp_path: Path
) -> None:
    shape = read_shape(config, "config.json")
    assert shape.parameters == parameters
    assert shape.kv_heads == kv_heads
    assert {linear.name for layer in shape.distinct for linear in layer.linears} == adapted
    assert shape.count("full_attention") == len(shape.layers)


def test_layers_of_unknown_mixers_are_counted_and_their_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lfm2 = {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    }
    shape = read_shape(lfm2, "config.json")
    assert [layer.kind for layer in shape.layers] == ["other", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(lfm2), encoding="utf-8")
    error = refused(capsys, "qwen3.6-27b", f"model.path={tmp_path}")
    assert "layers other than softmax attention" in error
    assert "conv.in_proj, conv.out_proj" in error


def test_a_run_without_gpus_is_planned_and_never_refused_for_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = PUBLIC_CONFIGS[QWEN32] | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    }
    (tmp_path / "config.json").write_text(json.dumps(small), encoding="utf-8")
    output = printed(capsys, "sandbox", f"model.path={tmp_path}", "--gpu-memory-gib", "1")
    assert "CPU process" in output
    assert "not estimated" in output
    assert "available" not in output
    words = ("sandbox", f"model.path={tmp_path}", "engine.kv_cache_gib=1000000")
    assert "of memory, but this machine has" in refused(capsys, *words)
    assert "not estimated" in printed(capsys, *words, "ray.address=10.0.0.1:6379")


def test_the_largest_micro_batch_is_the_budget_or_one_longest_sequence() -> None:
    config = load_config("qwen3.6-27b")
    assert micro_batch_tokens(config) == 32768
    assert micro_batch_tokens(load_config("qwen3.6-27b", ["learner.micro_batch_tokens=1000"])) == 28672
    longest = 4096 + 24576
    assert micro_batch_tokens(load_config("qwen3.6-27b", ["learner.micro_batch_tokens=1000000"])) == 6 * longest


def test_learner_workers_share_nothing_of_the_base_unless_it_is_sharded() -> None:
    shape = shape_of(QWEN27)

    def memory(workers: int, sharding: str) -> LearnerMemory:
        keys = [f"learner.workers={workers}", f"learner.sharding={sharding}"]
        return learner_memory(load_config("qwen3.6-27b", keys), shape)

    assert memory(1, "none") == memory(8, "none") == memory(1, "full")
    whole, parts = memory(8, "none"), memory(8, "full")
    weights = 2 * shape.parameters
    assert whole.resident[0].bytes == weights
    assert parts.resident[0].bytes == pytest.approx(weights / 8, rel=1e-5)
    layer = 2 * max(layer.parameters for layer in shape.layers)
    assert whole.peak - parts.peak == pytest.approx(weights * 7 / 8 - 2 * layer, rel=1e-5)


def test_workers_that_share_a_row_hold_their_part_of_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    shape = shape_of(QWEN27)

    def memory(sharing: int) -> LearnerMemory:
        return learner_memory(load_config("qwen3.6-27b", [f"learner.context_parallel={sharing}"]), shape)

    alone, four = memory(1), memory(4)
    assert (alone.part, four.part) == (32768, 8192)
    assert four.resident == alone.resident

    def size(memory: LearnerMemory, name: str) -> int:
        return sum(item.bytes for item in memory.backward if item.name == name)

    for name in ("activations: inputs of all layers", "activations: one layer, recomputed", "gradients of activations"):
        assert size(four, name) == pytest.approx(size(alone, name) / 4, rel=1e-3)
    # Of a delta net 10,240 channels, gate and output of 6,144 each, and two numbers a head: what is sent, what comes.
    assert size(four, "exchange with workers that share the tokens") == 2 * 2 * 8192 * (10240 + 2 * 6144 + 2 * 48)
    # Four heads of keys are one for each of four workers, and are sent twice to eight.
    keys = ["learner.workers=8", "learner.context_parallel=8"]
    sent = [48 * (10240 + 2 * 6144 + 2 * 48) + 16 * 2 * 256 * (24 + kv_heads) for kv_heads in (4, 8)]
    assert (
        exchanged_bytes(load_config("qwen3.6-27b", ["learner.context_parallel=4"]), shape, 32768) == 2 * 6144 * sent[0]
    )
    assert exchanged_bytes(load_config("qwen3.6-27b", keys), shape, 32768) == 2 * 3584 * sent[1]
    # What the table says would fit does, and no more.
    shared = ("qwen3.6-27b", "learner.context_parallel=4")
    fits = printed(capsys, *shared).split("would fit")[1].split()[0].replace(",", "")
    more = [f"agent.max_response_length={int(fits) - 4096}", "engine.max_num_seqs=1"]
    printed(capsys, *shared, *more, "agent.max_prompt_length=4096")
    assert "a learner worker needs" in refused(capsys, *shared, *more, "agent.max_prompt_length=4104")


def test_of_a_sharded_base_a_tied_embedding_stays_whole() -> None:
    tied = dataclasses.replace(shape_of(QWEN27), tied=True)
    config = load_config("qwen3.6-27b", ["learner.workers=8"])
    embedding = tied.vocabulary * tied.hidden
    assert base_parameters(config, tied) == pytest.approx((tied.parameters - embedding) / 8 + embedding, rel=1e-5)
    assert "LM head, gathered" not in [item.name for item in learner_memory(config, tied).forward]


def test_kv_cache_and_state_of_a_sequence() -> None:
    """16 full-attention layers of 4 heads of 256; 48 states of 48 heads of 128 x 128, and 3 inputs of 10,240."""
    shape = shape_of(QWEN27)
    assert kv_bytes(shape, 1, 2) == 16 * 2 * 4 * 256 * 2
    assert kv_bytes(shape, 8, 2) == 16 * 2 * 1 * 256 * 2  # heads are not split further, but repeated
    assert recurrent_state_bytes(shape, 1, 2) == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert recurrent_state_bytes(shape_of(QWEN32), 1, 2) == 0


def test_an_engine_takes_its_share_of_the_gpu_and_caches_in_the_rest() -> None:
    config, shape = load_config("qwen3.6-27b"), shape_of(QWEN27)
    memory = engine_memory(config, shape, 80 * GIB, 2 * GIB)
    assert memory.limit == int(80 * GIB * 0.85)
    assert memory.kv_cache == memory.limit - sum(item.bytes for item in memory.items)
    assert memory.items[0].bytes == shape.parameters  # two bytes a parameter over two GPUs
    judged = load_config("qwen3.6-27b", setting="self-judge")
    assert engine_memory(judged, shape, 80 * GIB, 0).length == self_judge_context_length(judged)


TURNS = (
    *("engine.colocate=true", "engine.engines=8", "engine.tensor_parallel=1", "engine.gpus_per_engine=0.6"),
    *("learner.workers=8", "learner.gpus_per_worker=0.4"),
)


def test_turns_on_the_same_gpus_are_planned_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "qwen3.6-27b", *TURNS)
    # The learner has all but two processes' contexts; its resting part, shared by eight, is an eighth of the base.
    assert "available 76.00 GiB" in " ".join(output.split())
    assert "engines and learner take turns: an active engine's 68.00 GiB" in output
    assert "if learning overlaps generation" not in output
    assert "step, without overlap" in output
    ahead = printed(capsys, "qwen3.6-27b", "train.staleness=1")
    assert "if learning overlaps generation" in ahead
    assert "step, without overlap" not in ahead
    assert "adapter slots (2)" in ahead
    assert "adapter slots (4)" in printed(capsys, "qwen3.6-27b", "train.staleness=3")


def test_turns_of_engines_of_two_gpus_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    split = ("engine.engines=4", "engine.tensor_parallel=2", "engine.gpus_per_engine=1.2")
    output = printed(capsys, "qwen3.6-27b", *TURNS, *split)
    assert "engines: 4, tensor parallel size 2; memory per GPU:" in output
    # Half of the weights on each GPU, and all of the GPU for the learner while they sleep.
    weights = next(line for line in output.splitlines() if line.startswith("engine weights"))
    assert weights.split()[-2:] == ["25.05", "GiB"]
    assert "available 76.00 GiB" in " ".join(output.split())
    assert "engines and learner take turns: an active engine's 68.00 GiB" in output


def test_an_engine_that_would_wake_into_the_learners_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    high = "engine.gpu_memory_utilization=0.95"
    error = refused(capsys, "qwen3.6-27b", *TURNS, high)
    assert "an engine needs 76.00 GiB of a GPU of 80.00 GiB" in error
    fitting = error.split("lower engine.gpu_memory_utilization (0.95) to ")[1].strip()
    printed(capsys, "qwen3.6-27b", *TURNS, f"engine.gpu_memory_utilization={fitting}")
    refused(capsys, "qwen3.6-27b", *TURNS, f"engine.gpu_memory_utilization={float(fitting) + 0.01}")
    error = refused(capsys, "qwen3.6-27b", *TURNS, "learner.sharding=none", "--gpu-memory-gib", "104")
    assert "an idle learner worker keeps 53.84 GiB, which is too little for one sequence; " in error
    assert "set learner.sharding=full" in error


def test_a_kv_cache_of_given_size_is_held_against_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "take turns: an active engine's 68.00 GiB" in printed(capsys, "qwen3.6-27b", *TURNS, "engine.kv_cache_gib=8")
    for words in (TURNS, ("engine.tensor_parallel=1", "engine.gpus_per_engine=1")):
        error = refused(capsys, "qwen3.6-27b", *words, "engine.kv_cache_gib=40")
        fitting = error.split("lower engine.kv_cache_gib (40) to ")[1].strip()
        printed(capsys, "qwen3.6-27b", *words, f"engine.kv_cache_gib={fitting}")
        refused(capsys, "qwen3.6-27b", *words, f"engine.kv_cache_gib={float(fitting) + 0.2}")


def test_a_share_of_a_gpu_is_held_against_what_vllm_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    half = ("engine.tensor_parallel=1", "engine.gpus_per_engine=0.5", "--gpu-memory-gib", "140")
    error = refused(capsys, "qwen3.6-27b", *half)
    assert "has 70.00 GiB: engine.gpus_per_engine=0.5; lower engine.gpu_memory_utilization (0.85) to 0.5" in error
    printed(capsys, "qwen3.6-27b", *half, "engine.gpu_memory_utilization=0.5")


def time_of(config: DracoConfig, **given: float) -> tuple[float, float, float]:
    shape = shape_of(QWEN32)
    memory = engine_memory(config, shape, 140 * GIB, 0)
    found = step_time(config, shape, memory, Assumptions(**given))
    return found.generation, found.learning, found.sync


def test_time_follows_the_layout_and_the_assumptions() -> None:
    base = time_of(load_config("qwen2.5-32b"))
    more_workers = time_of(load_config("qwen2.5-32b", ["learner.workers=8"]))
    more_engines = time_of(load_config("qwen2.5-32b", ["engine.engines=4"]))
    assert more_workers == (base[0], pytest.approx(base[1] / 2), base[2])
    assert more_engines[0] < base[0]
    assert more_engines[1:] == base[1:]
    assert time_of(load_config("qwen2.5-32b"), learner_efficiency=0.175)[1] == pytest.approx(2 * base[1])
    assert time_of(load_config("qwen2.5-32b"), sync_gib_per_second=2)[2] == pytest.approx(base[2] / 2)
    assert time_of(load_config("qwen2.5-32b"), length_share=1.0)[0] > 2 * base[0]


def test_learning_costs_what_its_passes_cost() -> None:
    """Training, reference, recomputation, and old log-probs of the second of two minibatches; backward as a forward."""
    config, shape = load_config("qwen2.5-32b"), shape_of(QWEN32)
    matrices = 2 * shape.matrix_parameters
    found = learner_flops(config, shape, length=1e-6, sampled_share=0.0) / 1e-6
    assert found == pytest.approx(4.5 * matrices)
    plain = load_config("qwen2.5-32b", ["learner.kl_coefficient=0", "learner.gradient_checkpointing=false"])
    assert learner_flops(plain, shape, length=1e-6, sampled_share=0.0) / 1e-6 == pytest.approx(2.5 * matrices)


@pytest.mark.parametrize("override", ["gpu_tflops", "unknown=1", "gpu_tflops=-1", "gpu_tflops=fast"])
def test_a_wrong_assumption_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--assume"):
        assumptions([override])


def test_layer_types_in_a_config_are_read() -> None:
    config = PUBLIC_CONFIGS[QWEN27] | {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
    assert [layer.kind for layer in read_shape(config, "test").layers] == ["full_attention", "linear_attention"]


def test_the_judges_gpus_count(capsys: pytest.CaptureFixture[str]) -> None:
    served = ("judge.model=hosted_vllm/Qwen/Qwen3-32B", "judge.local.enabled=true", "judge.local.gpus_per_replica=2")
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "qwen3.6-27b", *served])
    said = (
        "judge hosted_vllm/Qwen/Qwen3-32B: 1 to 4 vLLM servers of 2 GPUs each; with engines and learner 10 to 16 GPUs "
        "in total"
    )
    assert said in capsys.readouterr().out
