"""Run the last stage of cluster/Dockerfile in a Debian made by debootstrap, for machines without a container runtime.

sudo python jobs/image_check.py [FOLDER]

What the first stage builds is taken from this checkout: .venv and .venv-appworld are mounted as /opt/draco and
/opt/appworld, and draco-ray itself is imported from its folder. Then the commands that Ray's cluster launcher needs are
run as the launcher runs them, in a login shell of the image's user. Needs root, debootstrap and Debian's package index;
FOLDER (a temporary one) takes 800 MB.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENTS = {"/opt/draco": REPOSITORY / ".venv", "/opt/appworld": REPOSITORY / ".venv-appworld"}
"""Folders that ``COPY --from=build`` would copy."""
BASE = "ca-certificates,libffi8,libreadline8,libsqlite3-0,libssl3,netbase,tzdata"
"""What the base image holds for its Python, beyond Debian's smallest installation."""
NO_TERMINAL = ("bash: cannot set terminal process group", "bash: no job control")
COMMANDS = (
    *("ray --version", "draco --version", "ssh -V", "rsync --version | head -n 1", "wget --version | head -n 1"),
    *("gcc --version | head -n 1", "bwrap --version", "test -w ~", 'test "$(id -u)" = 1000'),
    *(
        "python -c 'import boto3, vllm'",
        '"$DRACO_APPWORLD_PYTHON" -c "import appworld"',
        "draco config qwen3.6-27b > /dev/null",
    ),
)


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments.

    >>> instructions("# one" + chr(10) + "RUN a " + chr(92) + chr(10) + "  && b")
    [('RUN', 'a    && b')]
    """
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def last_stage(text: str) -> list[tuple[str, str]]:
    """Instructions after the last FROM."""
    every = instructions(text)
    start = max(index for index, (name, _) in enumerate(every) if name == "FROM")
    return every[start + 1 :]


def environment(stage: list[tuple[str, str]], path: str) -> dict[str, str]:
    """Variables that ``ENV`` sets, for a base image with this PATH."""
    words = [word for name, text in stage if name == "ENV" for word in shlex.split(text)]
    return {name: value.replace("$PATH", path) for name, _, value in (word.partition("=") for word in words)}


def login(command: str) -> list[str]:
    """A command as Ray's cluster launcher gives it to a container's shell."""
    return [
        "bash",
        "--login",
        "-c",
        "-i",
        f"source ~/.bashrc; export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore && ({command})",
    ]


def _mounted() -> Iterator[tuple[Path, str]]:
    """What is mounted below the new root: this checkout with its environments, and the Python they were made with."""
    yield REPOSITORY, str(REPOSITORY)
    for place, folder in ENVIRONMENTS.items():
        yield folder.resolve(), place
        yield folder.resolve(), str(folder.resolve())
        yield (prefix := (folder / "bin" / "python").resolve().parents[1]), str(prefix)
    for kernel in ("/proc", "/dev", "/sys"):
        yield Path(kernel), kernel


def _mount(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "--rbind", str(source), str(target)], check=True)


def build(root: Path) -> dict[str, str]:
    """Install Debian below ``root`` and run the last stage there; returns the image's environment."""
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={BASE}", "bookworm", str(root)], check=True)
    # Root's own Python may be mounted below /root, where other users need it.
    (root / "root").chmod(0o755)
    for folder, place in _mounted():
        _mount(folder, root / place.lstrip("/"))
    stage = last_stage((REPOSITORY / "cluster" / "Dockerfile").read_text(encoding="utf-8"))
    for name, text in stage:
        if name == "RUN":
            subprocess.run(["chroot", str(root), "sh", "-c", text], check=True)
        elif name == "COPY" and "--from" not in text:
            source, target = text.split()
            (root / target.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / source, root / target.lstrip("/"))
    return environment(stage, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")


def main() -> None:
    """Build, then run each command in a login shell of the image's user."""
    if os.environ.get("DRACO_OWN_MOUNTS") is None:
        # Mounts of a namespace of their own end with it.
        again = ["unshare", "--mount", sys.executable, *sys.argv]
        os.execvpe(again[0], again, {**os.environ, "DRACO_OWN_MOUNTS": "1"})
    root = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="draco-image-")).resolve()
    # Only root can enter a folder that mkdtemp makes.
    root.mkdir(exist_ok=True)
    root.chmod(0o755)
    variables = build(root) | {"HOME": "/home/draco", "TERM": "dumb", "PYTHONPATH": str(REPOSITORY)}
    for command in COMMANDS:
        done = subprocess.run(
            ["chroot", "--userspec=draco:draco", str(root), *login(command)],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(NO_TERMINAL)]
        said = " ".join(lines)[-200:]
        print(f"{'ok' if done.returncode == 0 else 'FAILED'}  {command}: {said}", flush=True)
        if done.returncode:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
