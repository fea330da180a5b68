"""An Inspect task whose scorer is ours."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.support.adapters import ASK, CannedCompleter, emit


def booking(scorer: Any = None) -> Any:
    """A task of two samples that a scripted solver plays."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool
    from inspect_ai.solver import solver
    from inspect_ai.tool import ToolCall

    @solver
    def played() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            calls = [ToolCall(id="1", function="book", arguments={"flight": state.sample_id})]
            state.messages.append(ChatMessageAssistant(content="I book.", tool_calls=calls))
            state.messages.append(
                ChatMessageTool(content=f"booked {state.sample_id}", tool_call_id="1", function="book")
            )
            state.messages.append(ChatMessageAssistant(content="Done."))
            return state

        return solve

    return Task(dataset=[Sample(id=flight, input=ASK) for flight in ("DL9", "UA1")], solver=played(), scorer=scorer)


def main() -> None:
    """Print the score that the log holds."""
    from inspect_ai import eval
    from inspect_ai.log import read_eval_log

    from draco_ray.adapters.inspect_scorer import draco_scorer

    task = booking(draco_scorer("canned", complete=CannedCompleter()))
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(task, model="mockllm/model", log_dir=folder, display="none", log_realtime=False)
        found = read_eval_log(log.location)
        emit(
            {
                "status": found.status,
                "scores": {
                    str(s.id): s.scores["draco"].model_dump(mode="json") for s in found.samples or () if s.scores
                },
            }
        )


if __name__ == "__main__":
    main()
