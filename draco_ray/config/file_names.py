"""Names that become parts of paths and must not lead out of a folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

MAX_BYTES = 200
"""Maximum length of a name; file systems allow 255 bytes, and suffixes need room."""


def validate_file_name(text: str) -> str:
    """``text``, if it is a plain name of a file or folder.

    Raises:
        ValueError: it is empty, ``.`` or ``..``, has a separator or a control character, or is too long.
    """
    if not text or text.strip(". ") == "" or any(c in "/\\" or not c.isprintable() for c in text):
        raise ValueError("expected a plain name, without separators or control characters, and not . or ..")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ValueError(f"expected a name of at most {MAX_BYTES} bytes")
    return text


FileName = Annotated[str, AfterValidator(validate_file_name)]
"""A configured name of a file or folder."""
