"""Loading a model's tokenizer, without PyTorch where it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draco_ray.errors import EngineError

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the class that is nothing but its tokenizer.json, in this version of transformers and in earlier ones."""


def load_tokenizer(path: str) -> Any:
    """Load what `transformers.AutoTokenizer` would.

    A plain one is loaded by its own class: AutoTokenizer imports PyTorch, which takes seconds and 350 MiB.

    Args:
        path: a model directory, or a name on the model hub.
    Raises: EngineError, one line, where there is none.
    """
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
