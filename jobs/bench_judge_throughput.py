"""CPU time of a judge call on the client's side: ours compared with others, against a server with canned replies.

python jobs/bench_judge_throughput.py [--calls 400] [--at-once 32]

Every client runs in a process of its own and asks about the same trace of some 25,000 characters; the server, on the
loopback interface, answers at once in the client's format. CPU time is the client process's, user and system,
after a warm-up. Ours renders the prompt, asks by LiteLLM, and reads and checks the verdicts; the bare loop and LiteLLM
send a fixed prompt and parse the reply's JSON. RULER asks once about four traces, the others once a trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL, KEY = "canned", "none"
CRITERIA = 8
OBSERVATION = "The list has more pages, and this line says what was found on this one of them.\n" * 25
STEPS = 10
WARM_UP = 20
RULER_TRACES = 4
CLIENTS = {
    "httpx": ("bare httpx loop", ".venv", "setup"),
    "litellm": ("LiteLLM", ".venv", "setup"),
    "ours": ("ours (score)", ".venv", "setup"),
    "ruler": ("ART's RULER", ".venv-adapter-art", ".venv-adapter-art/.ready"),
    "inspect": ("Inspect's model-graded scorer", ".venv-adapter-inspect", ".venv-adapter-inspect/.ready"),
}
"""Client -> name, environment, and the make target that installs it."""
Ask = Callable[[], Awaitable[object]]


def reply_for(client: str) -> str:
    """The text of the canned reply."""
    if client == "ruler":
        scores = [
            {"trajectory_id": str(n), "explanation": "It read it.", "score": 0.5} for n in range(1, 1 + RULER_TRACES)
        ]
        return json.dumps({"scores": scores})
    if client == "inspect":
        return "It read one page only, and the list has more.\n\nGRADE: C"
    entries = [
        {"rubric_index": n, "evidence": f"Step {n + 1}", "justification": "It read one page only.", "score": 1}
        for n in range(CRITERIA)
    ]
    return json.dumps({"entries": entries})


class Canned(BaseHTTPRequestHandler):
    """Answers every POST with the canned reply for the client that its path names."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Answer a chat completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": reply_for(self.path.split("/")[1])}
        body = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 6000, "completion_tokens": 300, "total_tokens": 6300},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""


def ours(base: str) -> Ask:
    """The judge's scoring question."""
    from dataclasses import replace

    from draco_ray.config.schema import JudgeConfig
    from draco_ray.judging.build import build_judge
    from draco_ray.judging.example import RUBRIC, example_trajectory
    from draco_ray.judging.judge import CallContext
    from draco_ray.judging.phases import Score

    os.environ["CANNED_KEY"] = KEY
    judge = build_judge(JudgeConfig(model=f"openai/{MODEL}", api_base=base, api_key_env="CANNED_KEY", reasks=0))
    trajectory = example_trajectory()
    turn = replace(trajectory.turns[0], observation=OBSERVATION)
    question = Score(
        replace(trajectory, turns=(*[turn] * STEPS, trajectory.turns[-1])),
        [replace(RUBRIC[0], title=f"Criterion {n}") for n in range(CRITERIA)],
    )

    async def ask() -> object:
        judged = await judge.ask(question, CallContext(group="g", task_id="t", rollout=0))
        assert judged.ok, judged.error
        return judged

    return ask


def httpx_loop(base: str) -> Ask:
    """A POST, and the reply's text."""
    import httpx

    client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None), headers={"Authorization": KEY})

    async def ask() -> object:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt()}]}
        answered = await client.post(f"{base}/chat/completions", json=body)
        return json.loads(answered.json()["choices"][0]["message"]["content"])

    return ask


def litellm_loop(base: str) -> Ask:
    """LiteLLM's completion, and the reply's text."""
    import litellm

    async def ask() -> object:
        messages = [{"role": "user", "content": prompt()}]
        found: Any = await litellm.acompletion(f"openai/{MODEL}", messages, api_base=base, api_key=KEY)
        return json.loads(found.choices[0].message.content)

    return ask


def ruler_loop(base: str) -> Ask:
    """ART's RULER on four traces."""
    from art.rewards import ruler

    traces = [
        [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": f"{n} {prompt()}"}]
        for n in range(RULER_TRACES)
    ]

    async def ask() -> object:
        given = {"api_base": base, "api_key": KEY}
        return await ruler(traces, f"openai/{MODEL}", extra_litellm_params=given)

    return ask


def inspect_loop(base: str) -> Ask:
    """Inspect's scorer on one trace."""
    from inspect_ai.model import ModelOutput, get_model
    from inspect_ai.scorer import Target, model_graded_qa
    from inspect_ai.solver import TaskState

    scorer = model_graded_qa(model=get_model(f"openai/{MODEL}", base_url=base, api_key=KEY, responses_api=False))

    async def ask() -> object:
        output = ModelOutput.from_content(MODEL, prompt())
        state = TaskState(MODEL, 1, 1, "Do it.", [], output=output)
        score = await scorer(state, Target("It reads every page."))
        assert score is not None
        assert score.value == "C"
        return score

    return ask


LOOPS = {"ours": ours, "httpx": httpx_loop, "litellm": litellm_loop, "ruler": ruler_loop, "inspect": inspect_loop}


def prompt() -> str:
    """A prompt about as long as ours."""
    return f"Grade this run.\n{OBSERVATION * STEPS}"


async def measure(client: str, base: str, calls: int, at_once: int) -> float:
    """CPU milliseconds a call."""
    ask, room = LOOPS[client](base), asyncio.Semaphore(at_once)

    async def one() -> None:
        async with room:
            await ask()

    await asyncio.gather(*(one() for _ in range(WARM_UP)))
    began = _cpu()
    await asyncio.gather(*(one() for _ in range(calls)))
    return 1000 * (_cpu() - began) / calls


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table, or measure one client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--client", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        print(asyncio.run(measure(asked.client[0], asked.client[1], asked.calls, asked.at_once)))
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("| client | CPU ms per call | traces per second and core |\n|---|---|---|")
    for client, (name, environment, target) in CLIENTS.items():
        python = REPOSITORY / environment / "bin" / "python"
        if not python.exists():
            print(f"| {name} | not installed: make {target} | |")
            continue
        words = ["--client", client, f"http://127.0.0.1:{server.server_port}/{client}/v1"]
        more = ["--calls", str(asked.calls), "--at-once", str(asked.at_once)]
        done = subprocess.run([python, __file__, *words, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1][:200]} | |")
            continue
        milliseconds = float(done.stdout.split()[-1])
        traces = RULER_TRACES if client == "ruler" else 1
        print(f"| {name} | {milliseconds:.1f} | {1000 * traces / milliseconds:.0f} |", flush=True)
    print(f"\n{asked.calls} calls, {asked.at_once} at once, {os.cpu_count()} cores, Python {sys.version.split()[0]}.")


if __name__ == "__main__":
    main()
