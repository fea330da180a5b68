"""How a judge is held to a JSON schema: strict ones, in the prompt's order, by whatever the endpoint honours."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.config.schema import JudgeConfig
from draco_ray.judging.completion import Request
from draco_ray.judging.endpoint import Endpoint, Server
from draco_ray.judging.example import EXAMPLES
from draco_ray.judging.phases import PHASES, AttributionEntry, CriterionEntry, credit_schema
from draco_ray.judging.prompts import load_prompts
from draco_ray.judging.reply import reply_schema

SETS = [load_prompts(Path("prompts/judge")), load_prompts(Path("prompts/judge-cache-friendly"))]


@pytest.mark.parametrize("prompts", SETS, ids=["judge", "cache-friendly"])
@pytest.mark.parametrize("phase", list(PHASES))
def test_schema_and_prompt_ask_for_the_same_fields_in_the_same_order(prompts: Any, phase: str) -> None:
    template = prompts.templates[phase]
    example = json.loads(template[template.rindex("```json") + 7 : template.rindex("```")])
    schema = EXAMPLES[phase].schema(template, JudgeConfig())
    assert (schema["required"], schema["additionalProperties"]) == (["request_tag", "entries"], False)
    items = schema["properties"]["entries"]["items"]
    for entry in items.get("anyOf", [items]):
        assert (entry["type"], entry["additionalProperties"]) == ("object", False)
        assert entry["required"] == list(entry["properties"]) == list(example["entries"][0])


@pytest.mark.parametrize("prompts", SETS, ids=["judge", "cache-friendly"])
def test_a_verdict_comes_after_its_reasons(prompts: Any) -> None:
    for phase, first, then in (("score", "justification", "score"), ("credit", "relevant_steps", "verdict")):
        template = prompts.templates[phase]
        assert template.rindex(f'"{first}"') < template.rindex(f'"{then}"')


def test_a_field_that_the_prompt_does_not_show_comes_last_and_one_that_is_optional_not_at_all() -> None:
    schema = reply_schema(AttributionEntry, '"verdict": "PASS", "explanation" : "e"')
    entry = schema["properties"]["entries"]["items"]
    assert entry["required"] == ["verdict", "explanation", "rubric_index", "rubric_title", "relevant_steps"]
    entry = reply_schema(CriterionEntry, "")["properties"]["entries"]["items"]
    assert entry["required"] == ["title", "description", "evaluator_instruction"]


def test_a_schema_says_what_it_can_of_what_is_demanded() -> None:
    array = credit_schema("", 3, 7)["properties"]["entries"]
    assert (array["minItems"], array["maxItems"]) == (3, 3)
    cited, uncited = (each["properties"] for each in array["items"]["anyOf"])
    assert cited["rubric_index"] == {"type": "integer", "minimum": 0, "maximum": 2}
    assert cited["relevant_steps"]["items"] == {"type": "integer", "minimum": 1, "maximum": 7}
    assert (cited["relevant_steps"]["minItems"], uncited["relevant_steps"]["maxItems"]) == (1, 0)
    assert uncited["verdict"]["enum"] == ["NOT_APPLICABLE"]


class Refused(Exception):
    def __init__(self, status: int, text: str = "no\n such  parameter") -> None:
        super().__init__(text)
        self.status_code = status


class ContextWindowExceededError(Refused):
    """LiteLLM's name for a prompt that is too long."""


class Provider:
    """LiteLLM's requests to an endpoint that refuses some arguments, or everything."""

    def __init__(self, *refuses: str, error: Exception | None = None) -> None:
        self.refuses, self.error = refuses, error or Refused(400)
        self.sent: list[str] = []

    async def acompletion(self, **arguments: Any) -> Any:
        self.sent.append("response_format" if "response_format" in arguments else "plain")
        if self.sent[-1] in self.refuses:
            raise self.error
        message = SimpleNamespace(content="reply", tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])


def endpoint(**config: Any) -> Endpoint:
    return Endpoint(JudgeConfig(prompt_cache="off", **config), "judge", "judge.model")


async def texts(endpoint: Endpoint, provider: Provider, times: int = 1) -> list[str]:
    found = []
    request = Request(messages=(), schema={"type": "object"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draco_ray.judging.endpoint.import_litellm_quietly", lambda: provider)
        patch.setattr("draco_ray.judging.endpoint.refused_parameters", lambda *_, **__: None)
        for _ in range(times):
            choice = (await endpoint.complete(request, Server(None, "key"), 100, 1.0)).choices[0]
            assert choice.finish_reason == "stop"
            found.append(choice.message.content)
    return found


async def test_a_schema_is_sent_wherever_it_is_not_switched_off() -> None:
    provider = Provider()
    assert await texts(endpoint(model="xai/grok-9"), provider) == ["reply"]
    structured = endpoint(structured_output=False)
    assert await texts(structured, provider) == ["reply"]
    assert not structured.constrained
    assert provider.sent == ["response_format", "plain"]


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_an_endpoint_that_refuses_a_schema_is_asked_without(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    provider, structured = Provider("response_format", error=Refused(status)), endpoint(model="m")
    assert await texts(structured, provider, 2) == ["reply"] * 2
    assert provider.sent == ["response_format", "plain", "plain"]
    assert not structured.constrained
    assert [record.getMessage() for record in caplog.records] == [
        "m refuses a JSON schema: no such parameter; replies are parsed without one"
    ]


async def test_what_is_refused_without_a_schema_too_or_for_another_reason_does_not_speak_against_schemas() -> None:
    structured = endpoint(model="m")
    everything = ("response_format", "plain")
    for provider, requests in (
        (Provider(*everything, error=Refused(500)), 1),
        (Provider(*everything, error=ContextWindowExceededError(400)), 1),
        (Provider(*everything, error=ValueError("no status")), 1),
        (Provider(*everything), 2),
    ):
        with pytest.raises((Refused, ValueError), match=re.escape(str(provider.error))):
            await texts(structured, provider)
        assert len(provider.sent) == requests
    provider = Provider()
    await texts(structured, provider)
    assert provider.sent == ["response_format"]


async def test_the_newer_name_of_the_limit_does_not_speak_against_schemas() -> None:
    """Nor if a request that was sent under the older name ends after another has learned the newer one."""
    made, provider = endpoint(model="m"), Provider()
    says = Refused(400, "use max_completion_tokens, not max_tokens")
    sending, names = asyncio.Barrier(2), list[tuple[str, bool]]()

    async def acompletion(**arguments: Any) -> Any:
        (name,) = (each for each in arguments if each.endswith("_tokens"))
        names.append((name, "response_format" in arguments))
        if name == "max_tokens":
            await sending.wait()
            raise says
        return await Provider().acompletion(**arguments)

    provider.acompletion = acompletion  # type: ignore[method-assign]
    assert await asyncio.gather(texts(made, provider), texts(made, provider)) == [["reply"], ["reply"]]
    assert names == [("max_tokens", True)] * 2 + [("max_completion_tokens", True)] * 2
    assert made.constrained
