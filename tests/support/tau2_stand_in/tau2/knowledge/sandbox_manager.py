"""Stand-in for tau2.knowledge.sandbox_manager: settings in a file, documents in a folder, commands through `srt`."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path


class SandboxManager:
    """Runs commands with the environment it is given."""

    def __init__(self) -> None:
        self.sandbox_dir = Path(tempfile.mkdtemp(prefix="agentic_search_"))
        self.kb_dir = self.sandbox_dir / "knowledge_base"
        self.kb_dir.mkdir()
        self.settings_path = self.sandbox_dir / "srt-settings.json"
        settings = {"network": {}, "filesystem": {"denyRead": ["~/.ssh"], "allowWrite": []}}
        self.settings_path.write_text(json.dumps(settings))

    def __enter__(self) -> SandboxManager:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.sandbox_dir)

    def export_documents(self, documents: list[dict[str, str]], file_format: str = "txt") -> None:
        """A file a document, and an index."""
        for document in documents:
            name = document["id"].replace(" ", "_")
            (self.kb_dir / f"{name}.{file_format}").write_text(f"# {document['title']}\n\n{document['content']}")
        (self.kb_dir / f"INDEX.{file_format}").write_text("# Knowledge Base Index\n")

    def run_command(self, command: str, timeout: int = 30) -> tuple[int, str, str]:
        """Exit code and what the command prints; whatever goes wrong is for the agent to read."""
        try:
            done = subprocess.run(
                ["srt", "--settings", str(self.settings_path), command],
                capture_output=True,
                text=True,
                timeout=timeout,
                cwd=str(self.kb_dir),
            )
        except Exception as error:
            return 1, "", f"Command failed: {error}"
        return done.returncode, done.stdout, done.stderr
