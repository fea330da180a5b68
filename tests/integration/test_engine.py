"""The policy engine on a real vLLM process: sampling, weight syncs, the canary, cancellation, endings."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from draco_ray.config.schema import EngineConfig, LearnerConfig, ModelConfig
from draco_ray.engine.canary import CanaryReading, run_canary
from draco_ray.engine.vllm_engine import VllmEngine
from draco_ray.errors import CanaryFailed, EngineError
from draco_ray.learner.lora_learner import LoraLearner
from draco_ray.records import Adapter, FloatArray
from tests.support.probes import probe_of
from tests.support.tiny_model import build_tiny_model

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MAX_LENGTH = 1024
PROMPT = list(range(20, 120))
PROBE = [int(token) for token in np.random.default_rng(0).integers(3, 500, 200)]
LORA = LearnerConfig(gpus_per_worker=0, lora_rank=8, lora_alpha=16, gradient_checkpointing=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(build_tiny_model(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="module")
def learner(model: ModelConfig) -> LoraLearner:
    torch.set_num_threads(1)
    return LoraLearner(model, LORA, seed=0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ModelConfig, adapters: Path) -> AsyncIterator[VllmEngine]:
    """One engine for all tests below; they run in order and the last two end it."""
    config = EngineConfig(gpus_per_engine=0, kv_cache_gib=0.1, max_num_seqs=8, adapter_directory=adapters)
    engine = VllmEngine(config, model, max_model_len=MAX_LENGTH, lora_rank=8, seed=0, name="engine-0")
    await engine.start()
    yield engine
    await engine.stop()


def train(learner: LoraLearner, version: int, *, scale: float = 0.05) -> Adapter:
    """Move the learner's adapter away from the base model, differently for every version, as an update would."""
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: torch.from_numpy(values) + scale * torch.randn(values.shape, generator=generator)
        for name, values in learner.adapter(0).tensors.items()
    }
    learner.policy.load_adapter(tensors, f"version {version}")
    return learner.adapter(version)


def gap(left: list[float] | FloatArray, right: list[float] | FloatArray) -> float:
    return float(np.abs(np.asarray(left) - np.asarray(right)).mean())


def core_processes() -> list[psutil.Process]:
    found = []
    for child in multiprocessing.active_children():
        # A child that somebody else has waited for is still active to multiprocessing.
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [psutil.Process(child.pid)] if "EngineCore" in child.name else []
    return found


def versions_on_disk(adapters: Path) -> set[str]:
    return {file.parent.name.partition("-")[0] for file in adapters.rglob("adapter_model.safetensors")}


async def canary(engine: VllmEngine, learner: LoraLearner, version: int) -> CanaryReading:
    return await run_canary(engine, [probe_of(learner, PROBE)], version=version, moved=True, tolerance=0.02)


async def test_untrained_policy_samples_tokens_with_their_logprobs(engine: VllmEngine, learner: LoraLearner) -> None:
    sample = await engine.sample(PROMPT, max_tokens=30, seed=1)
    assert 1 <= len(sample.token_ids) <= 30
    assert len(sample.logprobs) == len(sample.token_ids)
    assert all(type(token) is int for token in sample.token_ids)
    assert sample.policy_version == engine.policy_version == 0
    learned = learner.token_logprobs(PROMPT + sample.token_ids, adapter=False)[len(PROMPT) :]
    assert gap(sample.logprobs, learned) < 1e-3


async def test_a_sample_keeps_to_a_json_schema(engine: VllmEngine, model: ModelConfig) -> None:
    """What a self-judge is held to, on a model that would never write JSON by itself."""
    number = {"type": "integer", "minimum": 0, "maximum": 3}
    entry = {"type": "object", "properties": {"score": number}, "required": ["score"], "additionalProperties": False}
    entries = {"type": "array", "items": entry, "minItems": 2, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"entries": entries},
        "required": ["entries"],
        "additionalProperties": False,
    }
    sample = await engine.sample(PROMPT, max_tokens=400, seed=1, schema=schema)
    text = AutoTokenizer.from_pretrained(model.path).decode(sample.token_ids, skip_special_tokens=True)
    assert sample.finish_reason == "stop"
    assert [0 <= each["score"] <= 3 for each in json.loads(text)["entries"]] == [True, True]
    assert len(sample.logprobs) == len(sample.token_ids)


async def test_a_seed_repeats_the_draw_and_another_changes_it(engine: VllmEngine) -> None:
    first, again, other = await asyncio.gather(*(engine.sample(PROMPT, max_tokens=30, seed=seed) for seed in (7, 7, 8)))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_statistics_count_what_is_sampled_and_what_waits(engine: VllmEngine) -> None:
    before = dataclasses.replace(engine.statistics)
    samples = await asyncio.gather(*(engine.sample(PROMPT, max_tokens=5, seed=seed) for seed in range(3)))
    now = engine.statistics
    assert now.sampled_tokens - before.sampled_tokens == sum(len(sample.token_ids) for sample in samples)
    assert now.prompt_tokens - before.prompt_tokens == 3 * len(PROMPT)
    assert (now.waiting, now.preemptions) == (0, before.preemptions)
    assert 0 <= now.kv_cache <= 1


async def test_a_turn_ends_with_its_end_of_turn_token_or_at_the_limit(engine: VllmEngine, model: ModelConfig) -> None:
    samples = await asyncio.gather(*(engine.sample(PROMPT, max_tokens=400, seed=seed) for seed in range(24)))
    ends = set(AutoTokenizer.from_pretrained(model.path).convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert {sample.finish_reason for sample in samples} <= {"stop", "length"}
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.token_ids[-1] in ends
        assert not ends & set(sample.token_ids[:-1])
    short = await engine.sample(PROMPT, max_tokens=1, seed=0)
    assert len(short.token_ids) == 1


async def test_a_later_turn_reads_what_came_before_from_the_prefix_cache(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, cached = engine._running(), []
    generate = llm.generate

    async def watched(*arguments: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        async for output in generate(*arguments, **options):
            if output.finished:
                cached.append(output.num_cached_tokens)
            yield output

    monkeypatch.setattr(llm, "generate", watched)
    opening = [7] * 5 + PROMPT
    turn = await engine.sample(opening, max_tokens=40, seed=2)
    await engine.sample(opening + turn.token_ids + PROMPT[:30], max_tokens=10, seed=2)
    block = engine._running().vllm_config.cache_config.block_size
    # Whole blocks; the last token sampled was never an input.
    assert cached[1] == (len(opening) + len(turn.token_ids) - 1) // block * block > 0
    assert cached[0] == 0


async def test_a_sequence_ends_at_the_models_length(engine: VllmEngine) -> None:
    prompt = (PROBE * 6)[: MAX_LENGTH - 3]
    sample = await engine.sample(prompt, max_tokens=100, seed=0)
    assert len(sample.token_ids) <= 3


async def test_a_trained_adapter_samples_and_agrees_with_the_learner(
    engine: VllmEngine, learner: LoraLearner, adapters: Path
) -> None:
    before = await engine.sample(PROMPT, max_tokens=40, seed=3)
    (core,) = core_processes()
    await engine.load_adapter(train(learner, 1))
    assert core_processes() == [core]

    reading = await canary(engine, learner, 1)
    assert reading.tokens == len(PROBE) - 1
    assert reading.gap_mean < 0.02
    assert reading.shift_mean > 0.1

    after = await engine.sample(PROMPT, max_tokens=40, seed=3)
    assert after.policy_version == 1
    assert after.token_ids != before.token_ids
    assert gap(after.logprobs, learner.token_logprobs(PROMPT + after.token_ids)[len(PROMPT) :]) < 0.02
    assert versions_on_disk(adapters) == {"v1"}


async def test_every_version_has_its_own_files_and_the_last_ones_go(
    engine: VllmEngine, learner: LoraLearner, adapters: Path
) -> None:
    seen = set()
    for version in (2, 3, 4):
        adapter = train(learner, version)
        await engine.load_adapter(adapter)
        (file,) = adapters.rglob("adapter_model.safetensors")
        seen.add(file)
        written = load_file(file)
        assert written.keys() == adapter.tensors.keys()
        assert all(np.array_equal(written[name], values) for name, values in adapter.tensors.items())
        assert (await canary(engine, learner, version)).gap_mean < 0.02
    assert len(seen) == 3


async def test_a_version_loaded_twice_does_not_reuse_the_first_ones_cache(
    engine: VllmEngine, learner: LoraLearner
) -> None:
    await engine.load_adapter(train(learner, 4))
    await engine.sample(PROBE, max_tokens=5, seed=0)
    other = replace(train(learner, 5), version=4)
    await engine.load_adapter(other)
    sample = await engine.sample(PROBE, max_tokens=20, seed=0)
    assert sample.policy_version == 4
    assert gap(sample.logprobs, learner.token_logprobs(PROBE + sample.token_ids)[len(PROBE) :]) < 0.02


async def admitted(engine: VllmEngine, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return once vLLM has each task's request under way, or has answered it."""
    vllm = engine._running().output_processor
    while vllm.get_num_unfinished_requests() < sum(not task.done() for task in tasks):  # noqa: ASYNC110 - vLLM has none
        await asyncio.sleep(0.001)


async def test_requests_under_way_keep_their_version(engine: VllmEngine, learner: LoraLearner, adapters: Path) -> None:
    await engine.load_adapter(train(learner, 6))
    tasks = [asyncio.create_task(engine.sample(PROMPT, max_tokens=300, seed=seed)) for seed in range(8)]
    await admitted(engine, tasks)
    older = learner.adapter(6)
    await engine.load_adapter(train(learner, 7))
    newer = await engine.sample(PROMPT, max_tokens=20, seed=0)
    assert newer.policy_version == 7
    assert gap(newer.logprobs, learner.token_logprobs(PROMPT + newer.token_ids)[len(PROMPT) :]) < 0.02

    learner.policy.load_adapter({name: torch.from_numpy(array) for name, array in older.tensors.items()}, "version 6")
    for sample in await asyncio.gather(*tasks):
        assert sample.policy_version == 6
        assert gap(sample.logprobs, learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :]) < 0.02
    assert versions_on_disk(adapters) == {"v7"}


async def test_what_comes_while_an_engine_sleeps_is_answered_when_it_wakes(
    engine: VllmEngine, learner: LoraLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU worker moves no memory: this is the protocol around it."""
    with pytest.raises(
        EngineError, match=r"^engine engine-0: cannot sleep, because it was started without engine\.colocate=true"
    ):
        await engine.sleep()
    monkeypatch.setattr(engine, "_config", engine._config.model_copy(update={"colocate": True}))
    await engine.load_adapter(train(learner, 22))
    under_way = asyncio.create_task(engine.sample(PROMPT, max_tokens=200, seed=1))
    await admitted(engine, [under_way])
    await engine.sleep()
    await engine.sleep()
    assert (await under_way).policy_version == 22
    waiting = asyncio.create_task(engine.sample(PROMPT, max_tokens=20, seed=0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    with pytest.raises(EngineError, match="is asleep; call wake"):
        await engine.load_adapter(learner.adapter(23))
    await engine.wake()
    await engine.wake()
    sample = await waiting
    assert gap(sample.logprobs, learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :]) < 0.02


async def test_scoring_the_base_model_beside_adapter_requests_changes_neither(
    engine: VllmEngine, learner: LoraLearner
) -> None:
    await engine.load_adapter(train(learner, 8))
    alone = await engine.logprobs(PROBE, adapter=False)
    tasks = [asyncio.create_task(engine.sample(PROMPT, max_tokens=200, seed=seed)) for seed in range(6)]
    await admitted(engine, tasks)
    beside = await asyncio.gather(*(engine.logprobs(PROBE, adapter=False) for _ in range(3)))
    for values in beside:
        assert gap(values, alone) < 1e-3
    assert gap(alone, learner.token_logprobs(PROBE, adapter=False)[1:]) < 1e-3
    for sample in await asyncio.gather(*tasks):
        assert gap(sample.logprobs, learner.token_logprobs(PROMPT + sample.token_ids)[len(PROMPT) :]) < 0.02


async def test_the_canary_stops_on_an_adapter_whose_names_do_not_map(engine: VllmEngine, learner: LoraLearner) -> None:
    adapter = train(learner, 9)
    elsewhere = {name.replace("model.layers", "model.decoder.layers"): value for name, value in adapter.tensors.items()}
    await engine.load_adapter(replace(adapter, tensors=elsewhere))  # vLLM takes it without a word.
    with pytest.raises(
        CanaryFailed, match=r"^engine engine-0, adapter version 9: the adapter has no effect.*names"
    ) as e:
        await canary(engine, learner, 9)
    assert "\n" not in str(e.value)


async def test_the_canary_stops_on_other_weights_than_the_learners(engine: VllmEngine, learner: LoraLearner) -> None:
    await engine.load_adapter(train(learner, 10))
    train(learner, 11)
    with pytest.raises(
        CanaryFailed, match=r"^engine engine-0, adapter version 11: .* differ by .* expected at most .* 0\.02;"
    ) as e:
        await canary(engine, learner, 11)
    assert "\n" not in str(e.value)


async def test_an_adapter_that_does_not_fit_is_refused_and_the_last_one_stays(
    engine: VllmEngine, learner: LoraLearner, model: ModelConfig, adapters: Path
) -> None:
    await engine.load_adapter(train(learner, 12))
    wide = LoraLearner(model, LORA.model_copy(update={"lora_rank": 32}), seed=0).adapter(13)
    strange = learner.adapter(13)
    strange = replace(strange, tensors={name.replace("q_proj", "x"): a for name, a in strange.tensors.items()})
    for adapter in (wide, strange):
        with pytest.raises(EngineError, match=r"^engine engine-0: adapter version 13 cannot be loaded: .*rank") as e:
            await engine.load_adapter(adapter)
        assert "\n" not in str(e.value)
    assert engine.policy_version == 12
    assert versions_on_disk(adapters) == {"v12"}
    assert (await canary(engine, learner, 12)).gap_mean < 0.02


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([5] * MAX_LENGTH, rf"prompt of {MAX_LENGTH} tokens leaves no room.*fewer than {MAX_LENGTH}"),
        ([], "prompt is empty"),
        ([5, 100_000], "token 100000 is not in the model's vocabulary of 512"),
        ([5, -1], "token -1 is not in the model's vocabulary"),
    ],
)
async def test_a_prompt_that_cannot_be_continued_is_one_clear_line(
    engine: VllmEngine, prompt: list[int], problem: str
) -> None:
    with pytest.raises(EngineError, match=rf"^engine engine-0: {problem}") as e:
        await engine.sample(prompt, max_tokens=5)
    assert "\n" not in str(e.value)
    assert (await engine.sample(PROMPT, max_tokens=3, seed=0)).token_ids


async def test_scoring_needs_two_tokens_that_fit(engine: VllmEngine) -> None:
    for tokens in ([5], [5] * MAX_LENGTH):
        with pytest.raises(EngineError, match=rf"cannot score a sequence of {len(tokens)} tokens; expected 2 to"):
            await engine.logprobs(tokens, adapter=False)


async def test_cancelling_a_sample_aborts_its_request(engine: VllmEngine, learner: LoraLearner, adapters: Path) -> None:
    await engine.load_adapter(train(learner, 14))
    tasks = [asyncio.create_task(engine.sample(PROMPT, max_tokens=900, seed=seed)) for seed in range(8)]
    await admitted(engine, tasks)
    assert any(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # vLLM refuses to empty its prefix cache while any request holds blocks of it.
    assert await engine._running().reset_prefix_cache()
    await engine.load_adapter(train(learner, 15))
    assert versions_on_disk(adapters) == {"v15"}
    assert (await engine.sample(PROMPT, max_tokens=5, seed=0)).policy_version == 15


async def test_stopping_fails_what_is_unfinished_and_leaves_nothing(engine: VllmEngine, adapters: Path) -> None:
    tasks = [asyncio.create_task(engine.sample(PROMPT, max_tokens=900, seed=seed)) for seed in range(8)]
    await admitted(engine, tasks)
    await engine.stop()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert failed
    assert all(isinstance(error, EngineError) and "stopped" in str(error) for error in failed)
    # Killed, and on a busy machine not quite gone.
    assert psutil.wait_procs(core_processes(), timeout=600)[1] == []
    assert list(adapters.iterdir()) == []
    with pytest.raises(EngineError, match="not running"):
        await engine.sample(PROMPT, max_tokens=1)
    await engine.stop()


async def test_a_killed_engine_core_is_one_clear_error(
    engine: VllmEngine, learner: LoraLearner, adapters: Path
) -> None:
    await engine.start()
    await engine.load_adapter(train(learner, 16))
    tasks = [asyncio.create_task(engine.sample(PROMPT, max_tokens=900, seed=seed)) for seed in range(8)]
    await admitted(engine, tasks)
    (core,) = core_processes()
    core.kill()
    failed = [e for e in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(e, BaseException)]
    assert failed
    for error in failed:
        assert isinstance(error, EngineError)
        assert str(error).startswith("engine engine-0: the engine core process has ended unexpectedly")
        assert "\n" not in str(error)
    with pytest.raises(EngineError, match="engine core process has ended"):
        await engine.sample(PROMPT, max_tokens=1)
    with pytest.raises(EngineError, match="engine core process has ended"):
        await engine.load_adapter(train(learner, 17))
    await engine.stop()
    assert psutil.wait_procs(core_processes(), timeout=600)[1] == []
    assert list(adapters.iterdir()) == []
