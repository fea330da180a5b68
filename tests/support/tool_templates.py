"""Our own chat templates with tools, in the forms of several model families, and small real tokenizers."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.chat_tokenizer import chat_tokenizer

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- 'Tools you may call:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
)
_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
_OTHERS = (
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
)
_BEGIN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}GENERATION{%- endif %}"
_CALLS = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + THOUGHT + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}"
    "{{- '<tool_call>\\n' }}CALL{{- '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
)
_JSON_CALL = (
    "{{- '{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}' }}"
)
_XML_CALL = (
    "{{- '<function=' + call.function.name + '>' }}{%- for name, value in call.function.arguments | items %}"
    "{{- '\\n<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>' }}"
    "{%- endfor %}{{- '\\n</function>' }}"
)

_QWEN = _TOOLS + _CALLS + _RESULTS + _OTHERS + _BEGIN
QWEN25 = _QWEN.replace("THOUGHT", "''").replace("CALL{{", _JSON_CALL + "{{").replace("GENERATION", "")
"""Calls in JSON; no reasoning. Qwen2.5's form."""
QWEN3 = (
    _QWEN.replace("THOUGHT", "''")
    .replace("CALL{{", _JSON_CALL + "{{")
    .replace(
        "GENERATION",
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    )
)
"""The same, with reasoning that the policy opens itself."""
QWEN3_LAST = QWEN3.replace(
    "+ '' + message.content",
    "+ ('<think>\\n\\n</think>\\n\\n' if loop.last and not message.tool_calls else '') + message.content",
)
"""The same; a last turn without calls begins with empty reasoning, as in the template of Qwen3's models."""
NAMED = QWEN25.replace(
    "+ message.content + '\\n</tool_r",
    "+ message.name + ' ' + message.tool_call_id + ': ' + message.content + '\\n</tool_r",
)
"""Results repeat the name and id of their call. The form of Hermes 2 Pro and others."""
QWEN35 = (
    _QWEN.replace("THOUGHT", "'<think>\\n\\n</think>\\n\\n'")
    .replace("CALL{{", _XML_CALL + "{{")
    .replace(
        "GENERATION",
        "{{- '<think>\\n' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{%- endif %}",
    )
)
"""Calls in tags, reasoning that the template opens. The form of Qwen3.5 and Qwen3.6."""
LLAMA = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' + '<|eot_id|>' }}"
    "{%- else %}"
    "{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}"
    "{%- if tools and loop.first %}{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{%- endif %}"
    "{{- message.content + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""A bare JSON object is a call; results have the role ``ipython``; at most one call per turn. Llama 3's form."""

_NINE = (
    "{%- if IDENTITY is not defined or IDENTITY | length != 9 %}"
    "{{- raise_exception('an id has nine characters') }}{%- endif %}"
)
_MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}OPEN{%- for call in message.tool_calls %}"
    + _NINE.replace("IDENTITY", "call.id")
    + "CALL{%- endfor %}CLOSE{{- eos_token }}"
    "{%- elif message.role == 'assistant' %}{{- ' ' + (message.content | trim) + eos_token }}"
    "{%- elif message.role == 'tool' %}"
    + _NINE.replace("IDENTITY", "message.tool_call_id")
    + "{{- '[TOOL_RESULTS] {\"content\": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}"
    "{%- elif message.role == 'user' %}"
    "{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' }}"
    "{%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- message.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
MISTRAL = (
    _MISTRAL.replace("OPEN", "{{- '[TOOL_CALLS] [' }}")
    .replace(
        "CALL{%", _JSON_CALL.replace("+ '}'", "+ ', \"id\": \"' + call.id + '\"}'") + "{{- ', ' if not loop.last }}{%"
    )
    .replace("CLOSE", "{{- ']' }}")
)
"""A list of calls with ids of nine characters; a blank before text without calls. The form of Mistral's 7B."""
MISTRAL_ARGS = (
    _MISTRAL.replace("OPEN", "")
    .replace("CALL{%", "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%")
    .replace("CLOSE", "")
)
"""A mark before every call and one before its arguments. Mistral's later form."""

TEMPLATES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "qwen3 last": QWEN3_LAST,
    "named": NAMED,
    "qwen3.5": QWEN35,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral args": MISTRAL_ARGS,
}


def tool_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the control tokens of the families."""
    tokenizer = chat_tokenizer(template)
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(token, special=False) for token in tags])
    specials = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
    specials += ["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    specials += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    if "[INST]" in template:
        tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer
