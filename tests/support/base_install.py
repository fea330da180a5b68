"""A process that cannot import the packages of the extras, as after ``pip install draco-ray``.

Run as ``python -m tests.support.base_install CODE``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from collections.abc import Sequence

LEFT_OUT = frozenset({"accelerate", "matplotlib", "peft", "ray", "torch", "torchvision", "transformers", "vllm"})


class HidingFinder(importlib.abc.MetaPathFinder):
    """Import finder that hides the packages of the extras."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in LEFT_OUT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def in_base_install(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in such a process and wait for its end."""
    return subprocess.run([sys.executable, "-m", __name__, code], capture_output=True, text=True)


if __name__ == "__main__":
    sys.meta_path.insert(0, HidingFinder())
    exec(compile(sys.argv[1], "<code>", "exec"), {"__name__": "__main__"})
