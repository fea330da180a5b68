"""Loading a model's tokenizer, without PyTorch where it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draco_ray.errors import ConfigError, EngineError

TEMPLATES = Path(__file__).with_name("templates")
"""Chat templates that come with this package, for `model.chat_template`."""

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that is nothing but its tokenizer.json, in this version of transformers and in earlier ones."""


def load_tokenizer(path: str, chat_template: str | None = None) -> Any:
    """Load what `transformers.AutoTokenizer` would, with another chat template if one is named.

    A plain one is loaded by its own class: AutoTokenizer imports PyTorch, which takes seconds and 350 MiB.

    Args:
        path: a model directory, or a name on the model hub.
        chat_template: `model.chat_template`.
    Raises: EngineError, one line, where there is none; ConfigError for an unknown chat template.
    """
    tokenizer = _load(path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template_text(chat_template)
    return tokenizer


def chat_template_text(value: str) -> str:
    """The template that `model.chat_template` names: one of `TEMPLATES`, a file, or the template itself.

    Raises: ConfigError.
    """
    if "{{" in value or "{%" in value:
        return value
    shipped = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    file = TEMPLATES / f"{value}.jinja" if value in shipped else Path(value).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template={value!r}: expected one of {', '.join(shipped)}, or a file that can be read: {error}"
        ) from None


def _load(path: str) -> Any:
    try:
        file = Path(path) / "tokenizer_config.json"
        described = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if described.get("tokenizer_class") in PLAIN and "auto_map" not in described:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        where = "in this directory" if Path(path).is_dir() else "no such directory here, and from the model hub"
        raise EngineError(
            f"model {path}: {where} no tokenizer could be loaded ({said}); set model.path to a model directory, or to "
            "a hub name <owner>/<model>"
        ) from error
