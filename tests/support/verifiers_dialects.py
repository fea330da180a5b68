"""A taskset and a harness for the tests of `environment.use: verifiers`: each task uses another dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Dialects", "Speak"]

ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hello."}]},
    "responses": {"input": "Hello."},
    "messages": {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 50},
}


class SpeakConfig(vf.HarnessConfig):
    """No settings."""

    id: str = "verifiers_dialects"


class Speak(vf.Harness[SpeakConfig]):
    """Asks once in the dialect that the task's name says."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        """The only turn; see `verifiers.v1.Harness.launch`."""
        path, _, stream = data.name.partition("-")
        headers = {"Authorization": f"Bearer {secret}", "x-api-key": secret}
        async with httpx.AsyncClient(trust_env=False, timeout=600, headers=headers) as client:
            if path == "messages":
                counted = await client.post(f"{endpoint}/messages/count_tokens", json=ASKED[path])
                assert counted.json()["input_tokens"] > 0, counted.text
            answer = await client.post(f"{endpoint}/{path}", json={**ASKED[path], "stream": bool(stream)})
        failed = answer.status_code != 200 or "Done." not in answer.text
        return ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text)


class Dialects(vf.Taskset[vf.Task]):
    """A task for each dialect, streamed or not."""

    def load(self) -> Iterator[vf.Task]:
        """Return all tasks."""
        for path in ASKED:
            for name in (path, f"{path}-stream"):
                yield vf.Task(vf.TaskData(name=name, prompt="Hello."))
