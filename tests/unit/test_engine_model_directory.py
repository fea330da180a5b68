"""Model directories that cannot be used are named in one line, before anything slow is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draco_ray.engine.model_directory import (
    architectures,
    check_model_directory,
    is_local,
    load_tokenizer,
    save_tokenizer,
)
from draco_ray.errors import EngineError
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "complete")


@pytest.fixture
def model(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "model"))


def problem(model: Path | str) -> str:
    with pytest.raises(EngineError) as e:
        check_model_directory(model)
    message = str(e.value)
    assert "\n" not in message
    assert str(model) in message
    return message


def rewrite(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))


def test_a_complete_directory_passes(model: Path) -> None:
    check_model_directory(model)
    check_model_directory(str(model))
    assert is_local(model)
    assert architectures(model) == ("Qwen3ForCausalLM",)


def test_a_hub_name_is_left_to_the_hub() -> None:
    check_model_directory("Qwen/Qwen2.5-32B-Instruct")
    assert not is_local("Qwen/Qwen2.5-32B-Instruct")
    assert architectures("Qwen/Qwen2.5-32B-Instruct") == ()


@pytest.mark.parametrize("path", ["/nowhere/at/all", ".cache/no-such-model", "./model", "a/b/c", "DIR"])
def test_a_path_that_is_not_there(path: str) -> None:
    assert "no such directory; set model.path" in problem(path)


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in problem(model)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_no_json_object(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in problem(model)


def test_no_architecture(model: Path) -> None:
    rewrite(model / "config.json", architectures=[])
    assert "names no architecture" in problem(model)


def test_an_architecture_that_vllm_does_not_know(model: Path) -> None:
    rewrite(model / "config.json", architectures=["LinearRegressionForFun"])
    assert "the installed vLLM does not support architecture LinearRegressionForFun" in problem(model)


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no weights found; expected model.safetensors" in problem(model)


def test_an_index_whose_shards_are_not_all_there(model: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2-of-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "model-2-of-2.safetensors is not a complete file of weights (No such file" in problem(model)
    rewrite(model / "model.safetensors.index.json", weight_map={"a": "model.safetensors"})
    check_model_directory(model)


def test_weights_that_were_not_downloaded_completely(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n", whole[:-1], b""):
        weights.write_bytes(content)
        assert "model.safetensors is not a complete file of weights" in problem(model)


@pytest.mark.parametrize("content", ["{}", "{", "[]"])
def test_a_tokenizer_that_cannot_be_read(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(EngineError, match="in this directory no tokenizer could be loaded"):
        load_tokenizer(str(model))


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "GemmaTokenizerFast"])
def test_a_tokenizer_is_read_as_its_file_says_whatever_class_is_named(model: Path, name: str) -> None:
    text = "Hello,  world:\n e"
    before = load_tokenizer(str(model))(text)["input_ids"]
    rewrite(model / "tokenizer_config.json", tokenizer_class=name)
    rewrite(model / "config.json", model_type="llama")
    tokenizer = load_tokenizer(str(model))
    assert tokenizer(text)["input_ids"] == before
    assert tokenizer.decode(before) == text


def test_a_tokenizer_is_saved_as_the_models_own_files_with_the_template_that_is_used(
    model: Path, tmp_path: Path
) -> None:
    # A model of transformers 4, which has its template in the configuration.
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    rewrite(model / "tokenizer_config.json", tokenizer_class="Qwen2TokenizerFast", chat_template=template)
    (model / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    for number, chosen in enumerate((None, "{{ messages[0].content }}")):
        out = tmp_path / str(number)
        save_tokenizer(str(model), out, chosen)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            assert (out / name).read_bytes() == (model / name).read_bytes()
        assert load_tokenizer(str(out)).chat_template == (chosen or template)
        assert not (out / "config.json").exists()


def test_no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "no tokenizer found; expected one of tokenizer.json" in problem(model)


def test_no_chat_template(model: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (model / name).unlink(missing_ok=True)
    rewrite(model / "tokenizer_config.json", chat_template=None)
    assert "the tokenizer has no chat template" in problem(model)
    rewrite(model / "tokenizer_config.json", chat_template="{{ messages }}")
    check_model_directory(model)


def test_neither_the_check_nor_importing_the_engine_imports_vllm_or_torch(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    code = (
        "import asyncio, sys\n"
        "from draco_ray.config.schema import EngineConfig, ModelConfig\n"
        "from draco_ray.engine.vllm_engine import VllmEngine\n"
        "from draco_ray.errors import EngineError\n"
        "engine = VllmEngine(EngineConfig(), ModelConfig(path=sys.argv[1]), max_model_len=64, lora_rank=8, seed=0,\n"
        "                    name='engine-0')\n"
        "try:\n"
        "    asyncio.run(engine.start())\n"
        "except EngineError as error:\n"
        "    print(error, sorted({'vllm', 'torch', 'transformers', 'ray'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert "no tokenizer" in done.stdout
    assert done.stdout.endswith("[]\n")
