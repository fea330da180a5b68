"""The starter policy's tokenizer and training, on a toy language."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draco_ray.engine.chat import ChatTokenizer
from draco_ray.sandbox.starter import train as train_module
from draco_ray.sandbox.starter.demonstrations import Example
from draco_ray.sandbox.starter.settings import StarterSettings
from draco_ray.sandbox.starter.tokenizer import TURN_END, train_tokenizer
from draco_ray.sandbox.starter.train import length_grouped_batches, new_model, train

TEXTS = [
    "<code>\nrows = apis.spotify.show_song_library(access_token=spotify_token)\nprint(len(rows))\n</code>",
    "<code>\nfor row in rows:\n    apis.spotify.like_song(song_id=row, access_token=spotify_token)\n</code>",
    "assistant\nuser\nsystem\nDone. 2023",
] * 3
SETTINGS = StarterSettings(hidden_size=32, intermediate_size=32, layers=1, heads=1, key_value_heads=1, batch_tokens=128)
VOCABULARY = 600
TOKENIZER = train_tokenizer(TEXTS, VOCABULARY, 256)


def examples(count: int) -> list[Example]:
    """Sequences whose second half repeats the first; only the second half is learnt."""
    rng = np.random.default_rng(3)
    made = []
    for index in range(count):
        half = rng.integers(3, 259, 4 + index % 5).tolist()
        made.append(Example(token_ids=(*half, *half), sampled=(False,) * len(half) + (True,) * len(half)))
    return made


def test_any_text_survives_the_tokenizer() -> None:
    for text in [*TEXTS, "ünïcödé 🙂\t\x00 <|im_end|>", "    indented\n\n\n"]:
        assert TOKENIZER.decode(TOKENIZER.encode(text), clean_up_tokenization_spaces=False) == text


def test_the_tokenizer_spends_few_tokens_on_frequent_code() -> None:
    assert len(TOKENIZER) <= VOCABULARY
    assert [TOKENIZER.decode([token]) for token in TOKENIZER.encode("apis.spotify.like_song(")] == [
        "apis.spotify.like_song("
    ]
    assert len(TOKENIZER.encode("2023")) == 4


def test_the_same_texts_give_the_same_tokenizer() -> None:
    again = train_tokenizer(TEXTS, VOCABULARY, 256)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_the_agent_can_chat_with_the_tokenizer() -> None:
    chat = ChatTokenizer(TOKENIZER, thinking=False)
    assert chat.end_of_turn_id == TOKENIZER.convert_tokens_to_ids(TURN_END) == TOKENIZER.eos_token_id
    assert not chat.opens_thinking


@pytest.mark.parametrize("budget", [64, 128, 1000])
def test_batches_hold_every_example_once_within_the_budget(budget: int) -> None:
    shown = examples(40)
    epoch = length_grouped_batches(shown, budget, np.random.default_rng(0))
    assert sorted(index for batch in epoch for index in batch) == list(range(40))
    assert all(len(batch) * max(len(shown[index].token_ids) for index in batch) <= budget for batch in epoch)


def test_an_example_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    shown = [Example(token_ids=(1,) * 50, sampled=(True,) * 50), *examples(3)]
    assert [0] in length_grouped_batches(shown, 40, np.random.default_rng(0))


@pytest.mark.parametrize("bfloat16", [True, False])
def test_training_learns_what_is_sampled_and_is_reproducible(bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the CPU can, and what is served is bfloat16 in either case."""
    monkeypatch.setattr(train_module, "has_bfloat16", lambda: bfloat16)
    shown = examples(24)
    weights = []
    for _ in range(2):
        seen: list[tuple[int, int, float]] = []
        model = new_model(TOKENIZER, SETTINGS, seed=1)
        last = train(model, [shown] * 12, SETTINGS, 1, lambda *update, seen=seen: seen.append(update))
        weights.append(model.state_dict())
        assert [done for done, _, _ in seen] == list(range(1, seen[0][1] + 1))
        assert last < seen[0][2] - 0.3
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights[0].values())


def test_training_leaves_pytorch_as_it_was() -> None:
    threads = torch.get_num_threads()
    random_before = torch.random.get_rng_state()
    model = new_model(TOKENIZER, SETTINGS, seed=1)
    train(model, [examples(3)], SETTINGS, 1)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.random.get_rng_state(), random_before)


def test_padding_and_what_is_not_sampled_do_not_move_the_loss() -> None:
    # A single update at two paddings: the longer companion only pads the shorter example.
    short = Example(token_ids=(5, 6, 7, 8), sampled=(False, False, True, True))
    silent = Example(token_ids=(9,) * 70, sampled=(False,) * 70)
    seen: list[float] = []
    for batch in ([short], [short, silent]):
        settings = SETTINGS.model_copy(update={"batch_tokens": 1000})
        train(new_model(TOKENIZER, settings, 1), [batch], settings, 1, lambda _done, _total, loss: seen.append(loss))
    assert seen[0] == pytest.approx(seen[1], abs=2e-2)
