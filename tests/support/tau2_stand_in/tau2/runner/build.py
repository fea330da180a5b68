"""Stand-in for tau2.runner.build: a desk with one tool; agent and customer are called over HTTP, as by tau2."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass
from typing import Any

from tau2.data_model.simulation import SimulationRun, Task, TerminationReason, TextRunConfig

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_user_id_by_name_zip",
        "description": "Finds a customer.",
        "parameters": {"type": "object", "properties": {"zip": {"type": "string"}}},
    },
}


@dataclass
class Tool:
    openai_schema: dict[str, Any]


class Environment:
    """A stand-in for a domain's."""

    def get_policy(self) -> str:
        return "# The stand-in's policy\nLook customers up first."

    def get_tools(self) -> list[Tool]:
        return [Tool(_TOOL)]

    def get_user_tools(self) -> list[Tool]:
        raise ValueError("User tools not available")


def build_environment(domain: str) -> Environment:
    return Environment()


@dataclass
class Said:
    content: str

    def validate(self) -> None:
        if not self.content:
            raise ValueError("UserMessage must have either content or tool_calls.")


class User:
    """Asks its model; a stand-in for the user simulator."""

    def __init__(self, config: TextRunConfig, task: Task) -> None:
        self._model, self._scenario = config.values["llm_user"], json.dumps(task.user_scenario)

    def generate_next_message(self, message: str, state: list[dict[str, Any]]) -> tuple[Said, list[dict[str, Any]]]:
        asked = [{"role": "system", "content": self._scenario}, *state, {"role": "user", "content": message}]
        reply = _ask("OPENAI", self._model, asked)
        return Said(reply["content"]), [*asked[1:], {"role": "assistant", "content": reply["content"]}]


class Orchestrator:
    """Lets agent and customer take turns until the customer stops."""

    def __init__(self, config: TextRunConfig, task: Task, seed: int) -> None:
        self._config, self._task, self._seed = config, task, seed
        self.user, self.environment = User(config, task), Environment()

    def run(self) -> SimulationRun:
        said = "Hi! How can I help you today?"
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": said}]
        state: list[dict[str, Any]] = []
        for _ in range(int(self._config.values["max_steps"])):
            answer, state = self.user.generate_next_message(said, state)
            messages.append({"role": "user", "content": answer.content})
            if "###STOP###" in answer.content:
                return self._ended(messages, TerminationReason.USER_STOP)
            said = self._agent(messages)
        return self._ended(messages, TerminationReason.MAX_STEPS)

    def _agent(self, messages: list[dict[str, Any]]) -> str:
        system = {"role": "system", "content": self.environment.get_policy()}
        while True:
            reply = _ask("HOSTED_VLLM", self._config.values["llm_agent"], [system, *messages], tools=[_TOOL])
            messages.append({"role": "assistant", "content": reply["content"], "tool_calls": reply.get("tool_calls")})
            if not reply.get("tool_calls"):
                if not reply["content"]:
                    raise ValueError("AssistantMessage must have either content or tool_calls.")
                return str(reply["content"])
            found = {"role": "tool", "content": "yusuf_rossi_9620"}
            messages += [{**found, "tool_call_id": call["id"]} for call in reply["tool_calls"]]

    def _ended(self, messages: list[dict[str, Any]], reason: TerminationReason) -> SimulationRun:
        return SimulationRun(
            id="stand-in", task_id=self._task.id, seed=self._seed, termination_reason=reason, messages=messages
        )


def build_orchestrator(config: TextRunConfig, task: Task, *, seed: int) -> Orchestrator:
    return Orchestrator(config, task, seed)


def _ask(provider: str, model: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = json.dumps({"model": model.partition("/")[2], "messages": messages, **more}).encode()
    headers = {"Authorization": f"Bearer {os.environ[f'{provider}_API_KEY']}", "Content-Type": "application/json"}
    url = f"{os.environ[f'{provider}_API_BASE']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message
