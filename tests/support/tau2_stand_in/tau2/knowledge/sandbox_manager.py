"""Stand-in for tau2.knowledge.sandbox_manager: settings in a file, commands through `srt`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path


class SandboxManager:
    """Runs commands with the environment it is given."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        self.settings_path = folder / "srt-settings.json"
        self._create_srt_settings()

    def _create_srt_settings(self) -> None:
        settings = {"network": {}, "filesystem": {"denyRead": ["~/.ssh"], "allowWrite": []}}
        self.settings_path.write_text(json.dumps(settings))

    def run_command(self, command: str) -> str:
        """What the command prints."""
        done = subprocess.run(
            ["srt", "--settings", str(self.settings_path), command], capture_output=True, text=True, check=False
        )
        return done.stdout
