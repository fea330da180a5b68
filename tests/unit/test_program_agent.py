"""Programs of users as agents: real processes against a real endpoint, behind which a script stands for the policy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from draco_ray.config.schema import AgentConfig, DataConfig, EnvironmentConfig
from draco_ray.environments import program as program_module
from draco_ray.environments.base import WorldVerdict
from draco_ray.errors import ConfigError, EngineError, EnvironmentCrashed
from draco_ray.records import EpisodeEnd, Message, Task, Trajectory
from draco_ray.rollout.agent import RolloutRequest, find_agent
from draco_ray.rollout.program_agent import ProgramAgent
from draco_ray.rollout.tokens import EnginePolicies, TokenPolicy
from draco_ray.rollout.worker import rollout_starter
from tests.support.endpoint_episode import CHAT, END, TASK, TOOL, ScriptedSampler, call, check_recorded_tokens
from tests.support.turns import AheadClock

CURL = """\
#!/bin/sh
# An agent in a shell: asks once, and once more with the answer.
set -e
ask() {
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
        -H 'Content-Type: application/json' -d "$1" | sed 's/.*"content":"\\([^"]*\\)".*/\\1/'
}
task=$(cat)
plan=$(ask "{\\"model\\": \\"policy\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"Plan: $task\\"}]}")
ask "{\\"model\\": \\"policy\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"Plan: $task\\"},
    {\\"role\\": \\"assistant\\", \\"content\\": \\"$plan\\"}, {\\"role\\": \\"user\\", \\"content\\": \\"Do it.\\"}]}"
"""
ASK = """\
import json, os, urllib.request
def ask(*said, tools=()):
    body = {"model": "m", "messages": [{"role": "user", "content": each} for each in said]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
SLEEP = "open('asleep', 'w'); import time; time.sleep(600)"


@dataclass
class HandIn:
    """A stand-in for an environment: keeps what it is handed."""

    task: Task = TASK
    given: list[str] = field(default_factory=list)

    async def act(self, action: str) -> str:
        self.given.append(action)
        return ""

    async def evaluate(self) -> WorldVerdict:
        raise NotImplementedError

    async def close(self) -> None:
        return


@dataclass
class Rollouts:
    """Plays programs; `lines` are the policy's."""

    folder: Path
    sampler: ScriptedSampler = field(default_factory=lambda: ScriptedSampler(lambda prompt: f"Done.{END}"))
    world: HandIn = field(default_factory=HandIn)

    def agent(self, source: str | None = None, **overrides: Any) -> ProgramAgent:
        if source is not None:
            file, text = self.folder / "agent.py", ASK + textwrap.dedent(source)
            # Once: another program may be reading it.
            if not file.exists():
                file.write_text(text)
            assert file.read_text() == text
            overrides = {"command": f"{sys.executable} agent.py", **overrides}
        config = AgentConfig.model_validate(
            {"use": "command", "folder": self.folder, "thinking": False, "timeout_seconds": 600, **overrides}
        )
        kind = find_agent(config.use)
        assert kind is ProgramAgent
        return ProgramAgent(TokenPolicy(self.sampler, CHAT, config), config, "{task_description}")

    async def play(self, source: str | None = None, *, rollout: int = 0, **overrides: Any) -> Trajectory:
        agent = self.agent(source, **overrides)
        request = RolloutRequest(task_id=TASK.task_id, group="g", rollout=rollout, attempt=0, seed=1)
        played = await agent.run(self.world, request)
        check_recorded_tokens(played, self.sampler)
        return played


@pytest.fixture
def rollouts(tmp_path: Path) -> Rollouts:
    return Rollouts(tmp_path)


def program(played: Trajectory) -> str:
    """What is recorded of the program."""
    assert played.turns[-1].role == "program"
    return played.turns[-1].text


async def test_a_shell_script_with_curl_is_an_agent(rollouts: Rollouts) -> None:
    (rollouts.folder / "agent.sh").write_text(CURL)
    rollouts.sampler = ScriptedSampler([f"Look first.{END}", f"Refunded.{END}"])
    played = await rollouts.play(command="sh agent.sh")
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None)
    assert played.prompt == (Message(role="user", content="Refund order A1."),)
    assert played.branches == (0,)
    assert [(turn.role, turn.text) for turn in played.turns[:-1]] == [
        ("user", "Plan: Refund order A1."),
        ("assistant", "Look first."),
        ("user", "Do it."),
        ("assistant", "Refunded."),
    ]
    assert [(step.action, step.message) for step in played.steps] == [("Look first.", False), (None, True)]
    assert "exit code 0" in program(played)
    assert "standard output:\nRefunded." in program(played)
    assert rollouts.world.given == ["Refunded."]


async def test_a_function_is_called_in_a_process_of_its_own(rollouts: Rollouts) -> None:
    (rollouts.folder / "mine.py").write_text(
        ASK + "import os\n"
        "async def play(task):\n"
        "    said = ask(task['prompt'])\n"
        "    return {'said': said, 'id': task['task_id'], 'parent': os.getppid()}\n"
    )
    played = await rollouts.play(function=f"{rollouts.folder}/mine.py:play")
    assert played.ended is EpisodeEnd.FINISHED, played.error
    (handed,) = rollouts.world.given
    assert '"said": "Done.", "id": "abc_1"' in handed
    missing = await rollouts.play(function=f"{rollouts.folder}/mine.py:pley")
    assert missing.ended is EpisodeEnd.SERVER_ERROR
    assert "mine.py has no 'pley'" in str(missing.error)


async def test_what_the_program_is_told(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-judges")
    monkeypatch.setenv("JUDGE_API_KEY", "the-judges")
    monkeypatch.setenv("SEARCH_API_KEY", "the-agents")
    rollouts.world.task = Task(task_id="abc_1", instruction="Grüße ☃ $(id)", fields={"customer": "Ann"})
    played = await rollouts.play(
        """
        import sys
        task = json.load(open(os.environ["DRACO_TASK_FILE"]))
        ask(sys.stdin.read())
        print(json.dumps([task, os.getcwd(), dict(os.environ)]))
        """,
        pass_environment=["SEARCH_API_KEY"],
    )
    assert played.turns[0].text == "Grüße ☃ $(id)\n"
    (handed,) = rollouts.world.given
    assert '"instruction": "Gr\\u00fc\\u00dfe \\u2603 $(id)", "fields": {"customer": "Ann"}' in handed
    assert str(rollouts.folder) in handed
    assert "the-judges" not in handed
    assert "the-agents" in handed
    assert '"OPENAI_BASE_URL": "http://127.0.0.1:' in handed


@pytest.mark.parametrize(
    ("source", "ended", "said"),
    [
        ("print('hello')", EpisodeEnd.SERVER_ERROR, "ended with exit code 0 and never called the endpoint.* hello"),
        ("raise ValueError('no')", EpisodeEnd.SERVER_ERROR, "exit code 1 and never called .* ValueError: no"),
        ("ask('a'); raise ValueError('no')", EpisodeEnd.CRASHED, "exit code 1; its last output: .*ValueError: no"),
        ("ask('a'); os.kill(os.getpid(), 9)", EpisodeEnd.CRASHED, "was killed by signal 9$"),
        (
            "ask('a'); print('no desk'); exit(75)",
            EpisodeEnd.SERVER_ERROR,
            "asks for a repetition of the rollout; .*output: no desk",
        ),
        ("ask('a'); os.abort()", EpisodeEnd.CRASHED, "was killed by signal 6"),
        (f"ask('a'); {SLEEP}", EpisodeEnd.CRASHED, "did not end within agent.timeout_seconds=600"),
        (SLEEP, EpisodeEnd.SERVER_ERROR, "timeout_seconds=600 and never called the endpoint"),
        # It is no doing of a policy that said nothing, and there is nothing to train on.
        ("ask('many words ' * 900)", EpisodeEnd.SERVER_ERROR, "exit code 1 and got no answer: .*length is 400 tokens"),
        ("os.environ['OPENAI_API_KEY'] = 'k'; ask('a')", EpisodeEnd.SERVER_ERROR, "got no answer: wrong key; expected"),
        ("ask('a'); ask('many words ' * 900)", EpisodeEnd.RESPONSE_LIMIT, "exit code 1 after it had reached a limit"),
        ("[ask('a') for _ in range(9)]", EpisodeEnd.TURN_LIMIT, "exit code 1 after it had reached a limit"),
    ],
)
async def test_how_a_program_ended_counts_and_is_said(
    rollouts: Rollouts, source: str, ended: EpisodeEnd, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_turns": 4, "max_prompt_length": 200, "max_response_length": 200}
    clock = AheadClock()
    monkeypatch.setattr(program_module, "time", clock)
    jumping = asyncio.create_task(clock.jump(600, when=(rollouts.folder / "asleep").exists))
    played = await rollouts.play(source, **limits)
    jumping.cancel()
    assert played.ended is ended
    assert played.error is not None
    assert "\n" not in played.error
    assert re.search(said, played.error), played.error
    assert rollouts.world.given == []
    # What was sampled before is kept.
    assert int(played.sampled_T.sum()) == sum(map(len, rollouts.sampler.sampled))


async def test_a_flood_of_output_is_cut_and_hinders_nobody(rollouts: Rollouts) -> None:
    played = await rollouts.play(
        """
        import sys
        for _ in range(100):
            print("x" * 50_000)
            print("é" * 50_000, file=sys.stderr)
        print(ask("a"))
        """,
        max_output_characters=1000,
    )
    assert played.ended is EpisodeEnd.FINISHED
    assert len(program(played)) < 4000
    assert "[output cut: " in program(played)
    assert "Done." in program(played)


@pytest.mark.parametrize("leaves", ["", "os.setsid()"])
async def test_children_do_not_outlive_their_program(rollouts: Rollouts, leaves: str) -> None:
    await rollouts.play(
        f"""
        import time
        ask("a")
        child = os.fork()
        if not child:
            {leaves or "pass"}
            open("child", "w").write(str(os.getpid()))
            time.sleep(600)
        while not os.path.exists("child") or not open("child").read():
            time.sleep(0.01)
        """
    )
    child = int((rollouts.folder / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        # One that was just ended may still be waited for by init.
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_a_policy_that_fails_ends_the_program_and_is_raised(rollouts: Rollouts) -> None:
    def fail(prompt: str) -> str:
        raise EngineError("engine 0: gone")

    rollouts.sampler = ScriptedSampler(fail)
    with pytest.raises(EngineError, match="engine 0: gone"):
        await rollouts.play("import time\ntry:\n    ask('a')\nfinally:\n    time.sleep(600)")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOENT, ConfigError), (errno.EACCES, ConfigError), (errno.EAGAIN, EnvironmentCrashed)],
)
async def test_a_machine_that_has_nothing_left_for_a_program_loses_its_rollout_alone(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(kind, match=rf"^agent\.command: .* cannot be started: .*{os.strerror(code)}$"):
        await rollouts.play("ask('a')")


def test_a_worker_may_open_as_many_files_as_the_machine_lets_it() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import resource\nfrom draco_ray.rollout.worker import _open_as_many_files_as_may_be\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
            "_open_as_many_files_as_may_be()\nprint(len(set(resource.getrlimit(resource.RLIMIT_NOFILE))))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "1\n"


async def test_a_world_that_is_lost_at_the_end_is_said(rollouts: Rollouts) -> None:
    async def lost(action: str) -> str:
        raise EnvironmentCrashed("world gone")

    rollouts.world.act = lost  # type: ignore[method-assign]
    played = await rollouts.play("print(ask('a'))")
    assert (played.ended, played.error) == (EpisodeEnd.SERVER_ERROR, "world gone")


async def test_many_run_side_by_side_on_one_server(rollouts: Rollouts) -> None:
    source = "import os\nprint(ask('a'), os.environ['OPENAI_BASE_URL'])"
    together = asyncio.Event()
    rollouts.sampler.hold = together

    async def release() -> None:
        while len(rollouts.sampler.asked) < 8:
            rollouts.sampler.begun.clear()
            await rollouts.sampler.begun.wait()
        together.set()

    plays = (rollouts.play(source, rollout=rollout, timeout_seconds=600) for rollout in range(8))
    played, _ = await asyncio.gather(asyncio.gather(*plays), release())
    assert {each.ended for each in played} == {EpisodeEnd.FINISHED}
    urls = {given.split()[1] for given in rollouts.world.given}
    assert len(urls) == 8
    assert len({url.split("/")[2] for url in urls}) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "expected agent.command='python my_agent.py', agent.function=file.py:name, or"),
        ({"command": "a", "function": "b:c"}, "expected agent.command="),
        ({"command": " "}, "agent.command: empty"),
        ({"command": "sh 'a"}, "agent.command=.*No closing quotation"),
        ({"command": "no-such-program x"}, "'no-such-program' is not an executable program"),
        ({"command": "./agent.sh"}, "'./agent.sh' is not an executable program"),
        ({"command": "sh a", "folder": "/no/such"}, "agent.folder='/no/such': no such folder"),
        (
            {"command": "python no/agent.py --fast"},
            r"agent.command: file 'no/agent.py' does not exist \(agent.folder is /",
        ),
        ({"function": "no/agent.py:play"}, r"agent.function: file '.*/no/agent.py' does not exist"),
    ],
)
def test_a_program_that_cannot_be_is_a_configuration_error(
    rollouts: Rollouts, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        rollouts.agent(**config)
    assert "\n" not in str(caught.value)


@dataclass
class Desk(HandIn):
    """A stand-in for an environment with tools."""

    task: Task = field(default_factory=lambda: replace(TASK, tools=json.dumps([TOOL])))
    breaks: bool = False

    async def act(self, action: str) -> str:
        self.given.append(action)
        if self.breaks:
            raise EnvironmentCrashed("the desk is\non fire")
        return "refunded ☃" + "x" * 500


async def test_a_program_calls_the_tools_of_its_world(rollouts: Rollouts) -> None:
    rollouts.world = Desk()
    two = call(order="A1").removesuffix(END) + "\n" + call(order="A2")
    rollouts.sampler = ScriptedSampler([two, f"Done.{END}"])
    command = "python -m draco_ray.rollout.call_tools"
    played = await rollouts.play(
        command=command, max_output_characters=300, max_prompt_length=4000, max_response_length=4000
    )
    assert (played.ended, played.error) == (EpisodeEnd.FINISHED, None), played.turns[-1].text
    # What it prints is not handed in: the world was acted in by its calls.
    assert [json.loads(each) for each in rollouts.world.given] == [
        {"name": "refund", "arguments": {"order": order}} for order in ("A1", "A2")
    ]
    step, closing = played.steps
    assert (closing.text, closing.message) == ("Done.", True)
    assert (step.observation or "").startswith("(1) refund: refunded ☃x")
    assert len(step.observation or "") < 700
    assert program(played).endswith("standard output:\nDone.")
    assert [turn.role for turn in played.turns] == ["tools", "user", "assistant", "assistant", "program"]


async def test_a_world_that_is_lost_under_a_program_is_no_rollout(rollouts: Rollouts) -> None:
    rollouts.world = Desk(breaks=True)
    rollouts.sampler = ScriptedSampler([call(order="A1")] * 2)
    played = await rollouts.play(
        command="python -m draco_ray.rollout.call_tools", max_prompt_length=4000, max_response_length=4000
    )
    assert (played.ended, played.error) == (EpisodeEnd.SERVER_ERROR, "the desk is\non fire")
    assert "the world is lost: the desk is on fire" in program(played)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[]", "400.*expected {"),
        ('{"name": 1}', "400.*expected {"),
        ('{"name": "refund", "arguments": [1]}', "400.*arguments: expected an object"),
        ("{", "400.*not JSON"),
        ('{"name": "refund"}', "200.*refunded"),
    ],
)
async def test_what_a_call_of_a_tool_may_be(rollouts: Rollouts, body: str, said: str) -> None:
    rollouts.world = Desk()
    played = await rollouts.play(
        f"""
        ask("a")
        headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
        request = urllib.request.Request(os.environ["DRACO_TOOLS_URL"], {body.encode()!r}, headers)
        try:
            answer = urllib.request.urlopen(request)
        except urllib.request.HTTPError as error:
            answer = error
        print(answer.status, answer.read().decode())
        """
    )
    assert re.search(said, program(played)), program(played)


async def test_a_world_without_tools_offers_none(rollouts: Rollouts) -> None:
    played = await rollouts.play("ask('a'); print('DRACO_TOOLS_URL' in os.environ)")
    assert rollouts.world.given == ["False\n"] or rollouts.world.given == ["False"]
    alone = await rollouts.play(command="python -m draco_ray.rollout.call_tools")
    assert "this task's world has no tools" in program(alone)
    assert played.ended is EpisodeEnd.FINISHED


def test_a_policy_without_tokens_is_refused() -> None:
    class Api:
        name = "openai/gpt"

    with pytest.raises(ConfigError, match="policy openai/gpt has no tokens to record"):
        ProgramAgent(Api(), AgentConfig(use="command", command="sh"), "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "policies", "said"),
    [
        ("sh", object(), "needs a policy on an engine, not an API model"),
        (
            "no-such-program",
            EnginePolicies(samplers=[], tokenizer=None),
            "'no-such-program' is not an executable program",
        ),
    ],
)
def test_what_cannot_be_played_is_said_before_workers_are_made(command: str, policies: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rollout_starter(
            policies,
            agent=AgentConfig(use="command", command=command),
            environment=EnvironmentConfig(),
            data=DataConfig(),
            ground_truth=False,
            run_name="x",
        )
