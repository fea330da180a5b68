"""Checks, without vLLM, whether an engine can load a model directory; loads tokenizers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from draco_ray.errors import ConfigError, EngineError

TEMPLATES = Path(__file__).with_name("templates")
"""Folder of this package's chat templates, for `model.chat_template`."""


def load_tokenizer(path: str, chat_template: str | None = None) -> Any:
    """Load a tokenizer, optionally with another chat template.

    A tokenizer.json is loaded as it is. AutoTokenizer would rebuild it from its vocabulary if the class named in
    tokenizer_config.json has a fixed form: under LlamaTokenizerFast, which models with byte-level tokenizers name too,
    texts would lose their spaces. AutoTokenizer also imports PyTorch, which takes seconds and 350 MiB.

    Args:
        path: a model directory, or a name on the model hub.
        chat_template: `model.chat_template`.
    Raises: EngineError, one line, if there is no tokenizer; ConfigError for an unknown chat template.
    """
    tokenizer = _load(path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template_text(chat_template)
    return tokenizer


def save_tokenizer(path: str, out: Path, chat_template: str | None = None) -> None:
    """Save the tokenizer that `load_tokenizer` loads, as the model's own files where it has them.

    transformers 5 would rewrite them, naming a class that transformers 4 does not know.
    """
    from transformers.utils import cached_file

    load_tokenizer(path, chat_template).save_pretrained(out)
    for pattern in ("*token*.json", "vocab*", "merges.txt", "*.model"):
        for file in Path(cached_file(path, "config.json")).parent.glob(pattern):
            shutil.copyfile(file, out / file.name)


def chat_template_text(value: str) -> str:
    """The text of `model.chat_template`, which is a name in `TEMPLATES`, a file, or the template itself.

    Raises: ConfigError.
    """
    if "{{" in value or "{%" in value:
        return value
    shipped = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    file = TEMPLATES / f"{value}.jinja" if value in shipped else Path(value).expanduser()
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template={value!r}: expected one of {', '.join(shipped)}, or a file that can be read: {error}"
        ) from None
    if "{{" not in text and "{%" not in text:
        raise ConfigError(f"model.chat_template={value!r}: contains no {{{{ or {{%; expected a Jinja template")
    return text


def _load(path: str) -> Any:
    try:
        from transformers.utils import cached_file

        settings, whole = (
            cached_file(path, name, _raise_exceptions_for_missing_entries=False)
            for name in ("tokenizer_config.json", "tokenizer.json")
        )
        described = json.loads(Path(settings).read_text(encoding="utf-8")) if settings else {}
        if whole is not None and "auto_map" not in described:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        # Damaged files make the libraries raise KeyError, TypeError or a bare Exception.
        said = " ".join(str(error).split())[:300]
        where = "in this directory" if Path(path).is_dir() else "no such directory, and from the model hub"
        raise EngineError(
            f"model {path}: {where} no tokenizer could be loaded ({said}); set model.path to a model directory, or to "
            "a hub name <owner>/<model>"
        ) from error


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_model_directory(path: str | Path, chat_template: str | None = None) -> None:
    """Check that ``path`` holds configuration, weights, tokenizer and chat template of a model that vLLM supports.

    Names of the model hub pass without a check.

    Args:
        path: `model.path`.
        chat_template: `model.chat_template`; if set, the directory needs no chat template.
    Raises: EngineError, one line: what is missing, where, what was expected and what to do.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if HUB_NAME.fullmatch(str(path)):
            return
        raise EngineError(
            f"model {path}: no such directory; set model.path to a model directory, or to a hub name <owner>/<model>"
        )
    _check_architecture(directory, _read_json(directory, "config.json", "a Hugging Face model configuration"))
    _check_weights(directory)
    _check_tokenizer(directory, needs_template=chat_template is None)


def is_local(path: str | Path) -> bool:
    """Whether ``path`` names a directory rather than a model of the hub."""
    return Path(path).expanduser().is_dir()


def architectures(path: str | Path) -> tuple[str, ...]:
    """Model classes that a local directory's ``config.json`` names; empty for a hub name."""
    if not is_local(path):
        return ()
    config = _read_json(Path(path).expanduser(), "config.json", "a Hugging Face model configuration")
    return tuple(config.get("architectures") or ())


def _check_architecture(directory: Path, config: dict[str, Any]) -> None:
    named = config.get("architectures") or []
    if not named:
        raise EngineError(
            f"model {directory}: config.json names no architecture; expected a key 'architectures' such as "
            "['Qwen3ForCausalLM']; save the model with save_pretrained"
        )
    known = _registry_text()
    if known and not any(f'"{architecture}"' in known for architecture in named):
        raise EngineError(
            f"model {directory}: the installed vLLM does not support architecture {', '.join(named)}; choose a causal "
            "language model such as Qwen3ForCausalLM"
        )


def _check_weights(directory: Path) -> None:
    files = {file.name for pattern in ("*.safetensors", "*.bin") for file in directory.glob(pattern)}
    index = next((name for name in WEIGHT_INDICES if (directory / name).is_file()), None)
    if index is not None:
        files |= set(_read_json(directory, index, "an index of weight files").get("weight_map", {}).values())
    if not files:
        raise EngineError(
            f"model {directory}: no weights found; expected model.safetensors or shards with an index; copy or "
            "download the model again"
        )
    for file in sorted(files):
        try:
            with safe_open(directory / file, "numpy") if file.endswith(".safetensors") else open(directory / file):
                pass
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"model {directory}: {file} is not a complete file of weights ({error}); download it again, with "
                "git lfs if it is in a git repository"
            ) from None


def _check_tokenizer(directory: Path, *, needs_template: bool) -> None:
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise EngineError(
            f"model {directory}: no tokenizer found; expected one of {', '.join(TOKENIZER_FILES)}; save the tokenizer "
            "there with tokenizer.save_pretrained"
        )
    files = ("chat_template.jinja", "chat_template.json")
    if not needs_template or any((directory / name).is_file() for name in files):
        return
    settings = directory / "tokenizer_config.json"
    if settings.is_file() and _read_json(directory, settings.name, "the tokenizer's settings").get("chat_template"):
        return
    raise EngineError(
        f"model {directory}: the tokenizer has no chat template; expected chat_template.jinja or the key "
        "'chat_template' in tokenizer_config.json; use an instruction-tuned model, or set model.chat_template"
    )


def _read_json(directory: Path, name: str, meaning: str) -> dict[str, Any]:
    file = directory / name
    if not file.is_file():
        raise EngineError(f"model {directory}: no {name}; expected {meaning}; set model.path to a model directory")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"model {directory}: {name} cannot be read ({error}); expected {meaning} as JSON") from error
    if not isinstance(content, dict):
        raise EngineError(f"model {directory}: {name} is not a JSON object; expected {meaning}")
    return content


def _registry_text() -> str:
    """Source code of vLLM's model registry, whose import would take seconds; empty if vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    for root in (found.submodule_search_locations if found else None) or ():
        registry = Path(root) / "model_executor" / "models" / "registry.py"
        if registry.is_file():
            return registry.read_text(encoding="utf-8")
    return ""
