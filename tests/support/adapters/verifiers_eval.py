"""verifiers' own program ``vf-eval`` with our environment; the servers of policy and judge answer by script."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.support import canned_judge
from tests.support.adapters import emit
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer

sys.path[:0] = [
    str(REPOSITORY / each)
    for each in ("examples/trainers/verifiers", "examples/parcels", "tests/support/adapters/plugins")
]


def main() -> None:
    """Print each attempt's last message, rewards and advantages, as vf-eval has written them."""
    from verifiers.v1.cli.eval.main import main as evaluate

    os.environ["OPENAI_API_KEY"] = "none"
    said = itertools.cycle(["The cheapest is DL9.", "I take UA1.", "It is XX0."])

    def judged(prompt: str) -> str | Reply:
        failed = prompt.startswith("You grade one run") and "XX0" in prompt
        return Reply(status=400) if failed else canned_judge.answer(prompt)

    with (
        tempfile.TemporaryDirectory() as folder,
        ScriptedJudgeServer(answer=lambda _: next(said)) as policy,
        ScriptedJudgeServer(answer=judged) as judge,
    ):
        evaluate(
            [
                "booking",
                *("--env.id", "draco-group", "--env.n", "3", "--env.agent.harness.id", "talk"),
                *("--env.agent.runtime.type", "subprocess"),
                *("--env.judge", "openai/canned", "--env.api-base", judge.base),
                *("--model", "policy", "--client.base-url", policy.base, "--client.api-key-var", "OPENAI_API_KEY"),
                *("--output-dir", folder, "--no-push", "--no-rich"),
            ]
        )
        (path,) = Path(folder).rglob("traces.jsonl")
        (episode,) = [json.loads(line) for line in path.read_text().splitlines()]
    emit(
        {
            trace["nodes"][-1]["message"]["content"]: [trace["rewards"]["draco"], trace["info"].get("draco")]
            for trace in episode["traces"]
        }
    )


if __name__ == "__main__":
    main()
