"""Hooks of mkdocs: the pages that are made from something else, and links that lead out of ``docs/``."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import draco_ray
from draco_ray.config.keys import described_keys
from draco_ray.config.schema import DracoConfig

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, the API and the configuration."""
    made = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "]("),
        "api.md": "\n".join(_api()),
        "configuration.md": "\n".join(_configuration()),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Keep the words of links to files of the repository, which are not part of the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def kept(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "../README.md":
            return f"[{words}]({posixpath.relpath('index.md', folder or '.')}{anchor})"
        return found[0] if files.get_file_from_path(path) else words

    return _LINK.sub(kept, markdown)


def _api() -> Iterator[str]:
    yield "# Python API\n\n```\n" + (draco_ray.__doc__ or "").partition("\n\n")[2].strip() + "\n```\n"
    for name, module in sorted(draco_ray._MODULES.items(), key=lambda item: item[0].lower()):
        yield f"::: draco_ray.{module}.{name}\n"


def _configuration() -> Iterator[str]:
    yield "# Configuration\n"
    yield "Every key with its default; `draco config CONFIG --keys` prints them with the values of a configuration.\n"
    part = ""
    for key in described_keys(DracoConfig()):
        head = key.name.rpartition(".")[0]
        if head != part:
            part = head
            yield f"\n## {part}\n"
        meaning = key.meaning.replace("``", "`").replace("<", "&lt;")
        kind = key.kind.replace("|", "\\|")
        yield f"`{key.name}`\n:   {kind}; default `{key.default}`. {meaning}\n"
