"""A harness that only talks, in the environment server's own process, so that no turn has to start one."""

from __future__ import annotations

from typing import ClassVar

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Talk"]


class TalkConfig(vf.HarnessConfig):
    """It has no settings of its own."""

    id: str = "talk"


class Talk(vf.Harness[TalkConfig]):
    """Sends the conversation so far to the policy, once per turn."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        """One turn; see `verifiers.v1.Harness.launch`."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        # The client's own limit for a connection is 5 s, which a loaded machine exceeds.
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except openai.APIStatusError as error:
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")
