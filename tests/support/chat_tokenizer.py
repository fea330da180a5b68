"""Small real tokenizers with chat templates in the manner of the policies' families."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

_OFF = "{%- if enable_thinking is defined and enable_thinking is false %}"
_TURNS = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '</think>' in message.content %}"
    "{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + CONTENT + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
)

QWEN3 = (
    _TURNS.replace("CONTENT", "message.content")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    + _OFF
    + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""Reasoning of earlier turns is stripped; thinking off is an empty think block."""

QWEN35 = (
    _TURNS.replace("CONTENT", "(message.content | trim)")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}"
    + _OFF
    + "{{- '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""The template opens the reasoning itself, and trims contents."""

QWEN25 = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    + _TURNS.replace("CONTENT", "message.content")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""A system message of its own; no reasoning."""

TEMPLATES = {"qwen3": QWEN3, "qwen3.5": QWEN35, "qwen2.5": QWEN25}

GEMMA = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{- message.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
"""Gemma 2's form: no system message, users and model in turn, no tools."""
PHI = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{{- '<|assistant|>' if add_generation_prompt else eos_token }}"
)
"""Phi's form: a role is a token, and the end of a text is another token than the end of a turn."""

_TEXTS = (
    "system\nuser\nassistant\nYou solve tasks by writing code. My name is Ann Lee. Your task is: like the songs.\n\n",
    "<code>\nprint(apis.supervisor.show_active_task())\n</code>\n<code>print(len(songs))</code> The task is done.\n",
)


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's control tokens, and those of Gemma and Phi for their templates.

    ``<think>`` is an added but not a special token, as in Qwen3.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(_TEXTS, BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet))
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    if template == GEMMA:
        tokens = ["<start_of_turn>", "<end_of_turn>"]
        tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": tokens})
    if template == PHI:
        tokens = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": tokens})
    return tokenizer
