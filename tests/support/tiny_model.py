"""A tiny random Qwen3 model with its tokenizer, saved as a model directory: tests load it where a run loads weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
POSITIONS = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEXTS = (
    "<code>\nprint(apis.supervisor.show_active_task())\n</code>\n",
    "<code>\npage_index = 0\nsongs = []\nwhile True:\n"
    "    page = apis.spotify.show_song_library(page_index=page_index)\n    if not page:\n        break\n"
    "    songs += page\n    page_index += 1\nprint(len(songs))\n</code>\n",
    "<code>\nfor playlist in apis.spotify.show_playlist_library(access_token=token):\n"
    "    print(playlist['title'])\n</code>\n",
    "<code>\napis.supervisor.complete_task(answer=None)\n</code>\n",
    "<think>\nI should look at the task first, then find the app that holds the answer.\n</think>\n",
    "system\nYou are an agent who solves tasks by writing code.\nuser\nOutput:\n```\nassistant\nThe task is done.\n",
    "How many songs are in my library? Follow all the artists of my playlists. Send the money to my friend by phone.\n",
    '{"message": "Execution failed.", "status": 401, "access_token": "0123456789", "email": "name@example.com"}\n',
)
"""Text in the agent's style from which the tokenizer learns merges; other text is encoded byte by byte."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
"""Qwen3's turns, and its empty think block if thinking is off."""


def tiny_tokenizer(texts: Sequence[str] = TEXTS, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocabulary`` entries; the end of a turn is its end-of-sequence token."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Save a random 0.9M-parameter Qwen3 model (float32) with its tokenizer and chat template in ``directory``.

    The same seed gives the same weights. Returns the directory, created where it did not exist.
    """
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        # Large enough that the next-token distribution is far from uniform, so that parity tests can fail.
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=True)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
