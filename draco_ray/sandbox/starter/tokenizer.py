"""The starter policy's tokenizer: a byte-level BPE over its own demonstrations, with a Qwen-style chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PADDING = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

PIECES = r" ?[A-Za-z_]+(?:\.[A-Za-z_]+)*\(?|\d| ?[^\sA-Za-z_\d]+|\n[ ]*|\s+"
"""Pieces of text whose borders no merge crosses. A dotted call and its parenthesis are one piece, a line break and the
indentation after it another, so frequent code costs few tokens; digits stay single, so numbers do not fill the
vocabulary."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}"
    "{{ '\\n' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's turns, with tool calls in JSON. A tool is listed by name and parameter names only, since the policy knows the
tools from demonstrations. The starter policy does not think, so an ``enable_thinking`` switch changes nothing."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, positions: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of at most ``vocabulary`` entries.

    Args:
        texts: what the policy will read and write, plain text; any other text still encodes, byte by byte.
        vocabulary: entries, the 256 bytes and three special tokens included.
        positions: tokens the model accepts, recorded in the tokenizer.
    Returns: a tokenizer whose end-of-sequence token is the end of a turn. Equal texts in equal order, equal entries.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in (PADDING, TURN_START, TURN_END)],
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PADDING,
        additional_special_tokens=[TURN_START],
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
