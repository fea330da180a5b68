"""Tokens of a conversation are those of `apply_chat_template`, over kinds of tokenizers and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.model_directory import chat_template_text, load_tokenizer
from draco_ray.engine.tool_calls import check_tool_calls_parsable
from draco_ray.errors import ConfigError
from draco_ray.records import TOOLS, Message
from draco_ray.training.demonstrations import Demonstration, as_sample

TEXTS = ["Hello there, book a room on Friday please. Yes! user assistant system find x y z the a of to and in"] * 50
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>"
    "{% endif %}{% endfor %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments|items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM 4.5's form: a turn ends with the token of the next role."""
GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>")
USER_TOOLS = GLM.replace("<|observation|>", "<|user|>")
"""Results of tools come from the user."""
THINKING_GLM = GLM.replace("<|assistant|>{% endif %}", "<|assistant|>\n<think></think>{% endif %}").replace(
    "<|{{ m.role }}|>", "<|{{ m.role }}|>{{ '\n<think></think>' if m.role == 'assistant' else '' }}"
)
"""GLM 4.6's without thinking."""


def byte_level(*, prefix: bool = False) -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return backend


def sentence_piece(scheme: str | None, normalizer: Any = None, model: Any = None, trainer: Any = None) -> Tokenizer:
    backend = Tokenizer(model or BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    if normalizer:
        backend.normalizer = normalizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    reserved = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainer or BpeTrainer(vocab_size=600, special_tokens=reserved, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def made(backend: Tokenizer, template: str, tokens: tuple[str, ...], **options: bool) -> PreTrainedTokenizerFast:
    backend.add_tokens([AddedToken(each, **{"special": True, "normalized": False, **options}) for each in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def blanks() -> PreTrainedTokenizerFast:
    """As GPT-NeoX: runs of blanks are added tokens."""
    backend = byte_level()
    backend.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    return made(backend, CHATML, ("<|im_start|>", "<|im_end|>"))


def words() -> PreTrainedTokenizerFast:
    """Its control tokens are in the model's vocabulary, and words are added behind them."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken(word, normalized=False) for word in ("yes", "please")])
    return made(backend, CHATML, ())


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
UNIGRAM = UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "<|user|>"], unk_token="<unk>", show_progress=False)
TOKENIZERS = {
    "rstrip": lambda: made(byte_level(), PHI, ROLES, rstrip=True),
    "lstrip": lambda: made(byte_level(), PHI, ROLES, lstrip=True),
    "both": lambda: made(byte_level(), PHI, ROLES, lstrip=True, rstrip=True),
    "normalized": lambda: made(byte_level(), PHI, ROLES, normalized=True),
    "prefix space": lambda: made(byte_level(prefix=True), PHI, ROLES),
    "blanks": blanks,
    "words": words,
    "first": lambda: made(sentence_piece("first"), LLAMA2, ("<s>", "</s>")),
    "always": lambda: made(sentence_piece("always"), PHI, ROLES, rstrip=True),
    "never": lambda: made(sentence_piece("never"), LLAMA2, ("<s>", "</s>")),
    "prepend": lambda: made(sentence_piece(None, PREPEND), LLAMA2, ("<s>", "</s>")),
    "replace": lambda: made(
        sentence_piece(None, normalizers.Replace(" ", "▁")), CHATML, ("<|im_start|>", "<|im_end|>")
    ),
    "unigram": lambda: made(sentence_piece("always", model=Unigram(), trainer=UNIGRAM), PHI, ROLES, rstrip=True),
    "roles": lambda: made(byte_level(), PHI.replace("<|end|>\n", ""), ROLES[:3]),
}


def theirs(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False, **options
    )
    return ids


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_conversation_becomes_the_tokens_of_apply_chat_template(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    chat = ChatTokenizer(tokenizer, thinking=False)
    asked = "  book a <|x room\n\n  please"
    prompt = chat.prompt([Message(role="user", content=asked)])
    assert prompt == theirs(tokenizer, [{"role": "user", "content": asked}])
    turn = chat.turn({"content": "yes the room"})
    assert chat.text(turn).strip() == "yes the room"
    told = [{"role": "assistant", "content": "yes the room"}, {"role": "user", "content": " y\nz "}]
    whole = prompt + turn + chat.after_turn(turn, " y\nz ")
    assert whole == theirs(tokenizer, [{"role": "user", "content": asked}, *told])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_outside_text_becomes_no_control_token(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    chat = ChatTokenizer(tokenizer, thinking=False)
    tokens = {
        id_: token for id_, token in tokenizer.added_tokens_decoder.items() if token.content[:2] in ("<|", "<s", "</")
    }
    forged = " ".join(token.content for token in tokens.values())
    plain, found = (
        [id_ for id_ in chat.prompt([Message(role="user", content=text)]) if id_ in tokens] for text in ("x", forged)
    )
    assert found == plain


def test_other_tokens_than_those_of_transformers_are_refused() -> None:
    """A token that is found only between blanks is no end of a turn where the template puts it behind a word."""
    with pytest.raises(ConfigError, match="tokenizes its chat template differently than"):
        ChatTokenizer(made(byte_level(), PHI, ROLES, single_word=True), thinking=False)


CALLS = [
    {"type": "function", "function": {"name": "find", "arguments": {"x": "a"}}},
    {"type": "function", "function": {"name": "book", "arguments": {"y": "b"}}},
]
TOOL = {"type": "function", "function": {"name": "find", "description": "-", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("template", [GLM, USER_TOOLS, THINKING_GLM])
def test_a_turn_may_end_with_the_token_of_the_next_role(template: str) -> None:
    tokenizer = made(byte_level(), template, GLM_TOKENS)
    chat = ChatTokenizer(tokenizer, thinking=False)
    check_tool_calls_parsable(chat, None)
    user, results = "<|user|>", "<|observation|>" if template != USER_TOOLS else "<|user|>"
    assert chat.end_of_turn_id == tokenizer.convert_tokens_to_ids(user)
    assert chat.ends == set(tokenizer.convert_tokens_to_ids([user, results]))
    messages = (
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "a room"},
        {"role": "assistant", "content": "yes", "tool_calls": CALLS},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "done"},
        {"role": "system", "content": "Be quick."},
        {"role": "assistant", "content": "ok"},
    )
    opening = (Message(role=TOOLS, content=json.dumps([TOOL])), Message(role="user", content="Hi"))
    sample = as_sample(Demonstration(name="d", opening=opening, rest=messages), chat)
    expected = theirs(tokenizer, [{"role": "user", "content": "Hi"}, *messages], tools=[TOOL])
    opened = chat.prompt([Message(role="user", content="-")])
    beginning = len(opened) - opened.index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
    assert sample.token_ids_T.tolist() == [*expected[:-beginning], chat.end_of_turn_id]
    ends = [index for index, id_ in enumerate(sample.token_ids_T.tolist()) if id_ in chat.ends]
    assert [bool(sample.loss_mask_T[index]) for index in ends] == [False, True, True, True]


def test_a_turn_that_ends_for_another_role_is_not_ended_by_it() -> None:
    tokenizer = made(byte_level(), GLM, GLM_TOKENS)
    chat = ChatTokenizer(tokenizer, thinking=False)
    user, results = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    for end, left_out in ((results, 1), (user, 0)):
        glue = chat.after_calls([5, end], ["find"], ["x"])
        assert glue == chat.after_calls([5], ["find"], ["x"])[left_out:]
    assert chat.text([5, results]) == chat.text([5])


HOISTED = (
    "{% for m in messages if m.role == 'system' %}<|system|>{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("template", [HOISTED, HOISTED.replace("<|system|>{{ m.content }}", "")])
def test_a_late_system_message_that_the_template_would_lose_or_move_is_refused(template: str) -> None:
    chat = ChatTokenizer(made(byte_level(), template, ROLES), thinking=False)
    messages = [{"role": "user", "content": "b"}, {"role": "system", "content": "No refunds."}]
    with pytest.raises(ConfigError, match="does not support a message of role 'system' after a turn"):
        chat.after_messages([5], (), messages)
    assert chat.after_messages([5], (), messages[:1]) == chat.after_turn([5], "b")


SINGLE = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|assistant|>"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments|tojson }}}'
    "<|end|>{% else %}<|{{ m.role }}|>{% if loop.first and tools %}{{ tools|tojson }}{% endif %}"
    "{% if m.role == 'tool' %}{{ m.name }}: {% endif %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Llama 3.1's form: a turn has exactly one call, and no text beside it."""


def test_results_name_their_calls_even_if_the_template_has_one_call_in_a_turn() -> None:
    tokenizer = made(byte_level(), SINGLE, (*ROLES, "<|tool|>"))
    chat = ChatTokenizer(tokenizer, thinking=False)
    glue = tokenizer.decode(chat.after_calls([5], ["find", "<|end|>"], ["a", "b"]))
    assert glue == "<|end|><|tool|>find: a<|end|><|tool|><|end|>: b<|end|><|assistant|>"
    assert chat.after_calls([5], ["find", "<|end|>"], ["a", "b"]).count(chat.end_of_turn_id) == 3
    message = {"role": "assistant", "content": "I look.", "tool_calls": CALLS[:1]}
    said = '\n{"name": "find", "parameters": {"x": "a"}}<|end|>'
    assert tokenizer.decode(chat.turn(message)) == f"I look.{said}"


WITHIN = SINGLE.replace("}}}<|end|>", "}}}").replace(
    "<|{{ m.role }}|>", "{% if m.role != 'tool' %}<|{{ m.role }}|>{% endif %}"
)


def test_results_within_the_turn_of_their_call_are_refused() -> None:
    """What comes before a turn's end is sampled, so the policy would be taken to write the results itself."""
    chat = ChatTokenizer(made(byte_level(), WITHIN, ROLES), thinking=False)
    with pytest.raises(ConfigError, match="does not support tools"):
        check_tool_calls_parsable(chat, None)


RESPONSE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<|response|>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Command R's form: a turn begins with a mark that the policy samples."""
UNMARKED = (
    "{% for m in messages %}{{ 'ASSISTANT: ' if m.role == 'assistant' else 'USER: ' }}{{ m.content }}"
    "{{ '<|end|>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Vicuna's form: nothing before the first turn is a control token."""


@pytest.mark.parametrize("template", [RESPONSE, UNMARKED])
def test_a_turn_begins_as_the_template_begins_it(template: str) -> None:
    tokenizer = made(byte_level(), template, (*ROLES, "<|response|>"))
    chat = ChatTokenizer(tokenizer, thinking=False)
    messages = [
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "z"},
        {"role": "assistant", "content": "y"},
    ]
    opening = (Message(role="user", content="Hi"),)
    sample = as_sample(Demonstration(name="d", opening=opening, rest=tuple(messages)), chat)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, *messages], tokenize=True, return_dict=False
    )
    assert sample.token_ids_T.tolist() == whole


@pytest.mark.parametrize(
    "said", ["{{ messages[0].content.index('zz') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_whatever_a_template_raises_is_one_line(said: str) -> None:
    with pytest.raises(ConfigError, match=r"rejects these messages: \w[^\n]*$"):
        ChatTokenizer(made(byte_level(), said + CHATML, ("<|im_start|>", "<|im_end|>")), thinking=False)


def test_a_template_that_leaves_out_texts_is_refused() -> None:
    parts = "{% for m in messages %}<|im_start|>{% for part in m.content if part.type == 'text' %}{{ part.text }}"
    parts += "{% endfor %}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out a turn's text"):
        ChatTokenizer(made(byte_level(), parts, ("<|im_start|>", "<|im_end|>")), thinking=False)


def test_a_chat_template_can_be_a_shipped_one_a_file_or_its_text(tmp_path: Path) -> None:
    made(byte_level(), CHATML, ("<|im_start|>", "<|im_end|>")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not support tools .* or set model\.chat_template"):
        check_tool_calls_parsable(ChatTokenizer(load_tokenizer(str(tmp_path)), thinking=False), None)
    check_tool_calls_parsable(ChatTokenizer(load_tokenizer(str(tmp_path), "hermes"), thinking=False), None)
    file = tmp_path / "mine.jinja"
    file.write_text(GLM, encoding="utf-8")
    assert load_tokenizer(str(tmp_path), str(file)).chat_template == GLM == chat_template_text(GLM)
    file.write_text("\ufeff" + GLM, encoding="utf-8")
    assert chat_template_text(str(file)) == GLM
    file.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="mine.jinja': contains no {{ or {%; expected a Jinja template"):
        chat_template_text(str(file))
    with pytest.raises(ConfigError, match="model.chat_template='mine': expected one of hermes, or a file"):
        chat_template_text("mine")
