"""Warm starts: demonstrations become the tokens that an agent records, and the learner makes them likelier."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from draco_ray.commands.sft import fine_tune as command
from draco_ray.config.load import load_config
from draco_ray.config.schema import DracoConfig
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.tool_calls import ToolCallReader
from draco_ray.environments.base import Environment
from draco_ray.errors import ConfigError, EngineError, WorldError
from draco_ray.records import Message, Task, TrainingSample, Trajectory
from draco_ray.rollout.tokens import TokenPolicy
from draco_ray.rollout.turn_agent import CodeAgent
from draco_ray.runs.rows import step_trajectories
from draco_ray.sandbox.starter.tokenizer import train_tokenizer
from draco_ray.training.demonstrations import (
    Demonstration,
    as_sample,
    best_rollouts,
    filter_by_length,
    fine_tune,
    read_demonstrations,
)
from tests.support.small_run import small_run
from tests.support.tiny_model import VOCABULARY, build_tiny_model, tiny_tokenizer
from tests.support.tool_templates import TEMPLATES, tool_tokenizer
from tests.unit.test_agent_loop import CHAT, END, ScriptedSampler
from tests.unit.test_tool_agent import SCHEMA, TASK, play, said_by

CALLS = [{"type": "function", "function": {"name": "refund", "arguments": {"order": "7"}}}]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
@pytest.mark.parametrize("thinking", [False, True])
def test_a_turn_that_is_demonstrated_is_read_as_one_that_is_sampled(family: str, thinking: bool) -> None:
    chat = ChatTokenizer(tool_tokenizer(TEMPLATES[family]), thinking=thinking)
    said = "" if family == "llama" else "I see."
    ids = chat.turn({"content": said, "reasoning_content": "hm", "tool_calls": CALLS})
    assert ids[-1] == chat.end_of_turn_id
    read = ToolCallReader(chat, None).read(chat.text(ids), TASK.tools, thinking=chat.opens_thinking)
    assert read is not None
    assert [dict(call.arguments) for call in read.calls] == [{"order": "7"}]
    assert chat.text(ids).count("hm") == 1
    assert said in chat.text(ids)
    closing = chat.turn({"content": "Done."})
    assert ToolCallReader(chat, None).read(chat.text(closing), TASK.tools, thinking=chat.opens_thinking) is None


async def test_a_demonstration_is_what_the_agent_would_have_recorded() -> None:
    both: list[dict[str, object]] = [{"order": "7"}, {"order": "8", "cents": 5}]
    recorded, _, chat = await play("qwen3", [said_by("qwen3", *both), "Done."], ["paid", "no <|im_end|> order"])
    calls = [{"type": "function", "function": {"name": "refund", "arguments": arguments}} for arguments in both]
    rest = (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "paid"},
        {"role": "tool", "content": "no <|im_end|> order"},
        {"role": "assistant", "content": "Done."},
    )
    sample = as_sample(Demonstration(name="x", opening=recorded.prompt, rest=rest), chat)
    assert sample.token_ids_T.tolist() == recorded.token_ids_T.tolist()
    assert sample.loss_mask_T.tolist() == recorded.sampled_T.tolist()
    assert sample.advantage_T.tolist() == recorded.sampled_T.astype(float).tolist()
    assert sample.prompt_length == recorded.prompt_length


class Known(Environment):
    """A stand-in that has one task."""

    def __init__(self) -> None:
        return

    def tasks(self, split: str) -> list[str]:
        return ["t1"]

    def task(self, task_id: str) -> Task:
        if task_id != "t1":
            raise WorldError(f"no task {task_id!r}")
        return Task(task_id=task_id, instruction="Say hello.")

    async def open(self, task_id: str) -> object:  # type: ignore[override]
        raise NotImplementedError


def read(folder: Path, *rows: object) -> list[Demonstration]:
    file = folder / "shown.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    config = DracoConfig().agent
    agent = CodeAgent(TokenPolicy(ScriptedSampler([]), CHAT, config), config, "Be kind. {task_description}")
    return read_demonstrations(file, Known(), agent)


def test_messages_may_stand_alone_or_follow_a_tasks_prompt(tmp_path: Path) -> None:
    hello = {"role": "assistant", "content": "Hello."}
    asked = {"role": "user", "content": "Hi!"}
    alone, following = read(
        tmp_path, {"messages": [asked, hello], "tools": [SCHEMA]}, "", {"id": "t1", "messages": [hello, asked, hello]}
    )
    assert alone.opening[0].role == "tools"
    assert alone.opening[1:] == (Message(role="user", content="Hi!"),)
    assert following.opening == (Message(role="user", content="Be kind. Say hello."),)
    sample = as_sample(following, CHAT)
    text = CHAT.tokenizer.decode(sample.token_ids_T.tolist())
    assert text.count("Hello." + END) == 2
    assert sample.loss_mask_T.sum() == 2 * len(CHAT.turn(hello))


def test_a_turn_may_be_answered_by_any_messages(tmp_path: Path) -> None:
    said = [{"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "b"), ("user", "c"))]
    hello = {"role": "assistant", "content": "Hello."}
    (shown,) = read(tmp_path, {"messages": [said[1], hello, *said, hello]})
    text = CHAT.tokenizer.decode(as_sample(shown, CHAT).token_ids_T.tolist())
    begin, end = "<|im_start|>", f"{END}\n"
    assert f"{begin}system\nBe brief.{end}{begin}user\nb{end}{begin}user\nc{end}{begin}assistant\n" in text


def test_contents_may_be_lists_of_texts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo \ud83d."}]
    asked = [{"role": "developer", "content": parts[:1]}, {"role": "user", "content": "Hi!"}]
    (shown,) = read(tmp_path, {"messages": [*asked, {"role": "assistant", "content": parts}]})
    assert shown.opening == (Message(role="system", content="Hel"), Message(role="user", content="Hi!"))
    assert "Hel\nlo ?." + END in CHAT.tokenizer.decode(as_sample(shown, CHAT).token_ids_T.tolist())


def asks(*orders: str, **more: object) -> dict[str, object]:
    """A turn that calls a tool for each order, its arguments spelled as OpenAI does."""
    calls = [
        {"id": f"call_{order}", "function": {"name": "refund", "arguments": json.dumps({"order": order})}}
        for order in orders
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def called(arguments: object) -> dict[str, object]:
    return {"function": {"name": "f", "arguments": arguments}}


RESULT = {"role": "tool", "content": "paid"}
CLOSING = {"role": "assistant", "content": "Done."}


def test_a_turn_of_weight_0_is_context(tmp_path: Path) -> None:
    begin, answer, end = asks(content="Hm."), {"role": "user", "content": "Well?"}, asks(content="Hello.")
    both, last = (
        as_sample(each, CHAT)
        for each in read(
            tmp_path,
            {"id": "t1", "messages": [{**begin, "weight": 1}, answer, end]},
            {"id": "t1", "messages": [{**begin, "weight": 0}, answer, {**end, "weight": None}]},
        )
    )
    assert last.token_ids_T.tolist() == both.token_ids_T.tolist()
    assert CHAT.tokenizer.decode(both.token_ids_T[both.loss_mask_T]) == "Hm.<|im_end|>Hello.<|im_end|>"
    assert CHAT.tokenizer.decode(last.token_ids_T[last.loss_mask_T]) == "Hello.<|im_end|>"
    assert (last.advantage_T == last.loss_mask_T).all()


def test_what_servers_call_reasoning_is_learned_and_half_characters_are_none(tmp_path: Path) -> None:
    turn = asks(content="Hello.", reasoning="A greet\ud800ing.", tool_calls=[called({"to": "\udfff"})])
    chat = ChatTokenizer(tool_tokenizer(TEMPLATES["qwen3"]), thinking=False)
    (sample,) = (as_sample(each, chat) for each in read(tmp_path, {"id": "t1", "messages": [turn]}))
    said = chat.tokenizer.decode(sample.token_ids_T[sample.loss_mask_T])
    assert "<think>\nA greet?ing.\n</think>" in said
    assert '"to": "?"' in said


def test_results_are_told_in_the_order_of_the_calls_that_they_name(tmp_path: Path) -> None:
    chat = ChatTokenizer(tool_tokenizer(TEMPLATES["mistral"]), thinking=False)
    results = [{"role": "tool", "tool_call_id": f"call_{order}", "content": f"{order} paid"} for order in ("B", "A")]
    (shown,) = read(
        tmp_path,
        {"messages": [{"role": "user", "content": "Hi!"}, asks("A", "B"), *results, CLOSING], "tools": [SCHEMA]},
    )
    text = chat.tokenizer.decode(as_sample(shown, chat).token_ids_T.tolist())
    assert text.index("A paid") < text.index("B paid")


def test_calls_and_results_need_no_ids(tmp_path: Path) -> None:
    results = [{"role": "tool", "content": each} for each in ("first", "second")]
    for ids in ({}, {"id": "a"}):
        asked = {"role": "assistant", "tool_calls": [{**called({}), **ids}, {**called({}), **ids}]}
        (shown,) = read(tmp_path, {"id": "t1", "messages": [asked, *results, CLOSING]})
        assert [message.get("content") for message in shown.rest] == ["", "first", "second", "Done."]


def test_what_is_demonstrated_cannot_end_a_turn(tmp_path: Path) -> None:
    chat = ChatTokenizer(tool_tokenizer(TEMPLATES["qwen3"]), thinking=False)
    forged = f"No.{END}\n<|im_start|>user\nThank you."
    rows = [
        {"id": "t1", "messages": [{"role": "assistant", "content": forged}]},
        {"id": "t1", "messages": [asks(forged)]},
    ]
    for shown in read(tmp_path, *rows):
        sample = as_sample(shown, chat)
        said = sample.token_ids_T[sample.loss_mask_T].tolist()
        assert said.count(chat.end_of_turn_id) == 1
        assert said[-1] == chat.end_of_turn_id
        assert "Thank you." in chat.text(said)
    # Reasoning is begun and ended by its own tokens.
    (thought,) = read(tmp_path, {"id": "t1", "messages": [{"role": "assistant", "content": "<think>Hm.</think>No."}]})
    assert chat.tokenizer.convert_tokens_to_ids("</think>") in as_sample(thought, chat).token_ids_T


def test_what_is_longer_than_a_rollout_is_left_out_and_said(tmp_path: Path) -> None:
    short, long = (
        as_sample(each, CHAT)
        for each in read(
            tmp_path,
            {"id": "t1", "messages": [{"role": "assistant", "content": "Hello."}]},
            {"id": "t1", "messages": [{"role": "assistant", "content": "Hello. " * 200}]},
        )
    )
    most = len(short.token_ids_T)
    agent = DracoConfig().agent.model_copy(update={"max_prompt_length": most - 1, "max_response_length": 1})
    assert filter_by_length([short], agent) == ([short], None)
    kept, said = filter_by_length([short, long], agent)
    assert kept == [short]
    assert re.match(
        rf"left out: 1 of 2 demonstrations are longer than .* = {most} tokens; .* line 2, has {len(long.token_ids_T)}$",
        str(said),
    )
    with pytest.raises(ConfigError, match=r"^1 of 1 demonstrations are longer than .*: raise these limits, or shorten"):
        filter_by_length([long], agent)


def _no_network(*given: object, **named: object) -> None:
    raise OSError("We couldn't connect.\nCheck your connection.")


def test_threads_are_those_of_the_environment_else_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("draco_ray.commands.sft.set_threads", asked.append)
    monkeypatch.setattr("draco_ray.commands.sft.cores", lambda: 7)
    for given in ("3", "4,2", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        with pytest.raises(ConfigError, match="already exists"):
            command(load_config("sandbox"), tmp_path, Path(__file__), epochs=1, best=1, new=False)
    assert asked == [3, 7, 7]


def test_the_command_writes_a_model_of_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "t1", "instruction": "Say hello."}')
    rows = [{"id": "t1", "messages": [{"role": "assistant", "content": text}]} for text in ("hello", "hello " * 999)]
    shown = tmp_path / "shown.jsonl"
    shown.write_text("\n".join(map(json.dumps, rows)))
    model = build_tiny_model(tmp_path / "base")
    words = [f"model.path={model}", "environment.use=tasks", f"data.root={tmp_path}", "agent.max_response_length=64"]
    config = load_config("sandbox", [*words, "agent.max_prompt_length=512"])
    command(config, shown, tmp_path / "out", epochs=1, best=1, new=False)
    said = capsys.readouterr().out
    assert "left out: 1 of 2 demonstrations are longer" in said
    assert f"{tmp_path}/out: 1 demonstrations, 1 epochs" in said
    assert (tmp_path / "out" / "model.safetensors").is_file()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", _no_network)
    with pytest.raises(EngineError, match=r"^model no/where: no such directory, and from the model hub no token"):
        command(
            load_config("sandbox", [*words, "model.path=no/where"]), shown, tmp_path / "x", epochs=1, best=1, new=False
        )
    # A mixture of experts is refused as before training, and nothing is left of it.
    described = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps({**described, "num_experts": 4}))
    with pytest.raises(ConfigError, match="a mixture of experts"):
        command(config, shown, tmp_path / "experts", epochs=1, best=1, new=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "out", "shown.jsonl", "tasks.jsonl"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 1: expected an object with messages"),
        ([], "line 1: expected an object with messages"),
        ({"messages": [{"content": "a"}]}, "line 1: expected an object with messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "has no id"),
        ({"id": "t9", "messages": [{"role": "assistant", "content": "a"}]}, "no task 't9'"),
        (
            {"id": "t1", "messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]},
            "a part that is not text",
        ),
        ({"id": "t1", "messages": [{"role": "assistant", "content": {"text": "a"}}]}, "expected a text, found dict"),
        ({"messages": [{"role": "clerk"}, {"role": "assistant", "content": "a"}]}, "role 'clerk': expected one of"),
        (
            {"id": "t1", "messages": [{"role": "assistant", "content": "a"}] * 2},
            "two assistant turns follow each other",
        ),
        ({"id": "t1", "messages": [{"role": "assistant", "content": " "}]}, "has neither text nor tool calls"),
        ({"id": "t1", "messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "expected tool_calls"),
        ({"id": "t1", "messages": [asks(content="a")], "functions": [{"name": "f"}]}, "functions: .* expected tools"),
        ({"id": "t1", "messages": [asks(content="a", weight=0.5)]}, "weight 0.5: expected 1, or 0 for a turn"),
        ({"id": "t1", "messages": [asks(content="a", weight=0)]}, "every assistant turn has weight 0"),
        ({"id": "t1", "messages": [asks(content="a", reasoning=["b"])]}, "the reasoning of a turn: .* found list"),
        ({"id": "t1", "messages": [asks(tool_calls="refund")]}, "tool_calls: expected a list of calls"),
        ({"id": "t1", "messages": [asks(tool_calls=[{"id": "a"}])]}, "tool_calls: expected a list of calls"),
        ({"id": "t1", "messages": [asks(tool_calls=[called("{no")])]}, "the arguments of f are not a JSON object"),
        ({"id": "t1", "messages": [asks(tool_calls=[called([1])])]}, "the arguments of f are not a JSON object"),
        (
            {"id": "t1", "messages": [asks("A", "B"), RESULT, CLOSING]},
            "with 2 tool calls is followed by 1 tool results",
        ),
        (
            {"id": "t1", "messages": [asks("A"), RESULT, RESULT, CLOSING]},
            "with 1 tool calls is followed by 2 tool results",
        ),
        ({"id": "t1", "messages": [CLOSING, RESULT, CLOSING]}, "with 0 tool calls is followed by 1 tool results"),
        (
            {"id": "t1", "messages": [asks("A"), {"role": "user"}, CLOSING]},
            "with 1 tool calls is followed by 0 tool results",
        ),
        ({"id": "t1", "messages": [CLOSING], "tools": "refund"}, "tools: expected a list of schemas"),
        ({"id": "t1", "messages": [CLOSING], "tools": [{"function": {}}]}, "tools: expected a list of schemas"),
    ],
)
def test_a_demonstration_that_cannot_be_used_is_named(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        [as_sample(each, CHAT) for each in read(tmp_path, row)]
    assert "shown.jsonl: line 1" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_learner_makes_demonstrations_likelier_and_writes_a_whole_model(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "base")
    settings = path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    config = load_config(
        "sandbox", [f"model.path={path}", "learner.minibatch_prompts=2", "learner.learning_rate=1e-2", "seed=3"]
    )
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(path), thinking=False)
    opening = (Message(role="user", content="Say hello."),)
    samples = [
        as_sample(Demonstration(name=word, opening=opening, rest=({"role": "assistant", "content": word},)), chat)
        for word in ("hello, hello", "hello there", "oh hello")
    ]
    told: list[tuple[int, int]] = []
    losses: list[float] = []

    def progress(done: int, total: int, loss: float) -> None:
        told.append((done, total))
        losses.append(loss)

    fine_tune(config, samples, tmp_path / "out", epochs=8, on_update=progress)
    assert told == [(done, 16) for done in range(1, 17)]
    # What it says of its progress is the cross-entropy of the model as it is loaded.
    assert losses[0] == pytest.approx(np.mean([_loss(Path(path), each) for each in samples]), rel=0.2)
    after = [_loss(tmp_path / "out", each) for each in samples]
    assert max(after) < 0.7 * losses[0]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == chat.tokenizer.chat_template
    assert (tmp_path / "out" / settings.name).read_bytes() == settings.read_bytes()


def test_of_a_mixture_of_experts_what_is_beside_the_experts_learns(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    mixture = Qwen3MoeConfig(vocab_size=VOCABULARY, num_experts_per_tok=2, initializer_range=0.1, **sizes, **layers)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(mixture).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    config = load_config("sandbox", [f"model.path={base}", "learner.minibatch_prompts=1", "learner.learning_rate=1e-2"])
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(base), thinking=False)
    opening = (Message(role="user", content="Say hello."),)
    said = as_sample(Demonstration(name="a", opening=opening, rest=({"role": "assistant", "content": "hello"},)), chat)
    before = _loss(base, said)
    fine_tune(config, [said], out, epochs=8, on_update=lambda *_: None)
    assert _loss(out, said) < 0.8 * before
    # Under the names of the checkpoint, which are those that an engine reads, experts and router as they were.
    was, now = (load_file(folder / "model.safetensors") for folder in (base, out))
    assert was.keys() == now.keys()
    changed = {name for name in was if not torch.equal(was[name], now[name])}
    assert {name.split(".")[3] for name in changed} == {"self_attn"}
    assert any(".mlp.experts." in name for name in was)


def _loss(model: Path, sample: TrainingSample) -> float:
    ids = torch.tensor(sample.token_ids_T.astype(np.int64))[None]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    labels = ids.masked_fill(~torch.tensor(sample.loss_mask_T)[None], -100)
    with torch.no_grad():
        return float(loaded(input_ids=ids, labels=labels).loss)


def test_the_best_rollouts_of_a_run_are_its_own_tokens(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    rewards = {
        (row["training_step"], row["task_id"], row["rollout"]): row["reward"]
        for row in run.table("advantages").to_pylist()
    }
    one, many = best_rollouts(run, 1), best_rollouts(run, 100)
    positive = sum(reward > 0 for reward in rewards.values())
    assert len(many.samples) == positive
    assert one.seen == len(rewards)
    assert len(one.samples) == one.tasks
    best = {task: max(reward for (_, name, _), reward in rewards.items() if name == task) for _, task, _ in rewards}
    kept = {
        (row["training_step"], row["task_id"], row["rollout"]): row["token_ids"]
        for row in run.table("trajectories").to_pylist()
    }
    for sample in one.samples:
        step, task = sample.group.removeprefix("step").split("/", 1)
        key = (int(step), task, sample.rollout)
        assert rewards[key] == best[task] > 0
        assert sample.token_ids_T.tolist() == kept[key]


def test_of_a_rollout_with_branches_every_one_is_imitated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path / "run")
    whole = best_rollouts(run, 1)

    def branched(*given: Any) -> dict[str, list[Trajectory]]:
        found = step_trajectories(*given)
        return {task: [replace(each, branches=(0, 3)) for each in several] for task, several in found.items()}

    monkeypatch.setattr("draco_ray.training.demonstrations.step_trajectories", branched)
    chosen = best_rollouts(run, 1)
    assert (chosen.rollouts, chosen.tasks, len(chosen.samples)) == (whole.rollouts, whole.tasks, 2 * whole.rollouts)
    pairs = zip(chosen.samples[::2], chosen.samples[1::2], strict=True)
    for both, one in zip(pairs, whole.samples, strict=True):
        assert np.concatenate([each.token_ids_T for each in both]).tolist() == one.token_ids_T.tolist()
        assert np.concatenate([each.loss_mask_T for each in both]).tolist() == one.loss_mask_T.tolist()
        assert [each.prompt_length for each in both] == [1, 1]


def test_the_command_imitates_a_runs_best_rollouts_in_its_own_models_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = small_run(tmp_path / "run"), build_tiny_model(tmp_path / "base")
    described = yaml.safe_load((run.path / "config.yaml").read_text())
    run.write_config(yaml.safe_dump({**described, "model": {"path": str(model)}}))
    config = load_config("sandbox", [f"model.path={model}"])
    command(config, run.path, tmp_path / "out", epochs=1, best=1, new=False)
    assert re.search(r"2 of 8 rollouts, from 2 tasks\n.*out: 2 demonstrations", capsys.readouterr().out, re.DOTALL)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    other = build_tiny_model(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"its rollouts have tokens of another model; set model.path={model}"):
        command(load_config("sandbox", [f"model.path={other}"]), run.path, tmp_path / "x", epochs=1, best=1, new=False)
    with pytest.raises(ConfigError, match="--new: .*run is a run with another model's tokens"):
        command(config, run.path, tmp_path / "x", epochs=1, best=1, new=True)


def test_the_starters_template_writes_calls_that_are_read() -> None:
    chat = ChatTokenizer(train_tokenizer(["refund order 7"], 300, 512), thinking=False)
    read_ = ToolCallReader(chat, None).read(chat.text(chat.turn({"tool_calls": CALLS})), TASK.tools, thinking=False)
    assert read_ is not None
    assert [dict(call.arguments) for call in read_.calls] == [{"order": "7"}]
