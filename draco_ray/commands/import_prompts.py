"""Extracts the paper's own prompts from its LaTeX source, for users who have the source and want the exact wording."""

from __future__ import annotations

import re
from pathlib import Path

from draco_ray.errors import ConfigError
from draco_ray.judging.phases import PHASES
from draco_ray.lab.files import create_output_folder

AGENT_LISTING = "prompts.py"
"""Name of the agent's system prompt in the listing's caption."""
AGENT_FILES = ("agent_think.txt", "agent_no_think.txt")
USER_SEPARATOR = "--- user ---"
"""Line between the system and the user part in our agent prompt files."""

# The options end with the first line that ends with a bracket.
_LISTING = re.compile(r"\\begin\{lstlisting\}(?:\[(?P<options>.*?)\]\n)?(?P<body>.*?)\\end\{lstlisting\}", re.DOTALL)
_FILE_NAME = re.compile(r"\\texttt\{((?:[^{}\\]|\\.)+\.(?:txt|py))\}")
_FIRST_USER_PLACEHOLDER = "{supervisor_first_name}"
# The appendix describes the variant without thinking: this line replaces the last two lines.
_NO_THINK_LINE = re.compile(r"final two lines replaced by\s+\\texttt\{(?P<line>[^{}]+)\}", re.DOTALL)


def import_prompts(source: Path, out: Path) -> list[Path]:
    """Extract the paper's prompts from its LaTeX source, and write them to the folder ``out``.

    The judge's prompts are written unaltered, under the paper's file names. The agent's prompt, if the source has it,
    becomes two files. In ``agent_think.txt`` a line `USER_SEPARATOR` is inserted before the line that introduces the
    supervisor, where the user part begins. In ``agent_no_think.txt`` also the last two lines are replaced, as the
    appendix describes.

    Args:
        source: the .tex file, or a folder with .tex files.
        out: created if it does not exist.

    Returns: the files written.

    Raises:
        ConfigError: ``source`` cannot be read or lacks a prompt of the judge, or a file in ``out`` has other content.
    """
    text = _read(source)
    listings = extract_listings(text)
    judged = [phase.template for phase in PHASES.values() if not phase.merged]
    if missing := sorted(set(judged) - set(listings)):
        found = ", ".join(sorted(listings)) or "none"
        raise ConfigError(f"{source}: no listing named {', '.join(missing)}; listings found: {found}")
    files = {name: listings[name] for name in judged}
    if AGENT_LISTING in listings:
        think = _separate_user_part(listings[AGENT_LISTING])
        files[AGENT_FILES[0]] = think
        if variant := _NO_THINK_LINE.search(text):
            kept = think.rstrip("\n").split("\n")[:-2]
            files[AGENT_FILES[1]] = "\n".join([*kept, _plain(variant["line"])]) + "\n"
    for name, content in files.items():
        path = out / name
        if path.exists() and path.read_bytes() != content.encode("utf-8"):
            raise ConfigError(f"{path}: already exists with different content; remove it or choose another --out")
    create_output_folder(out)
    for name, content in files.items():
        (out / name).write_bytes(content.encode("utf-8"))
    return [out / name for name in files]


def extract_listings(text: str) -> dict[str, str]:
    """Every ``lstlisting`` whose options name a file in ``\\texttt{...}``: file name -> body, byte for byte."""
    listings = {}
    for listing in _LISTING.finditer(text):
        if names := _FILE_NAME.findall(listing["options"] or ""):
            listings[_plain(names[-1])] = listing["body"]
    return listings


def _read(source: Path) -> str:
    files = sorted(source.rglob("*.tex")) if source.is_dir() else [source]
    if not files:
        raise ConfigError(f"{source}: contains no .tex file; expected the paper's LaTeX source")
    try:
        return "\n".join(file.read_text(encoding="utf-8").replace("\r\n", "\n") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None


def _plain(latex: str) -> str:
    """The text of a ``\\texttt`` argument: line breaks become spaces, and characters are unescaped."""
    return re.sub(r"\\([_#$%&{}])", r"\1", " ".join(latex.split()))


def _separate_user_part(prompt: str) -> str:
    before, found, after = prompt.partition(_FIRST_USER_PLACEHOLDER)
    if not found:
        return prompt
    system, _, line = before.rpartition("\n")
    return f"{system}\n{USER_SEPARATOR}\n{line}{found}{after}"
