"""What LiteLLM's table says of a model, and that asking it fetches and prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from draco_ray.judging import tokens
from draco_ray.judging.tokens import import_litellm_quietly, litellm_model_info, model_limit, refused_parameters
from tests.conftest import REPOSITORY


def test_the_price_list_is_the_packages_own_and_nothing_is_sent_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = import_litellm_quietly()
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP", raising=False)
    monkeypatch.setattr(litellm, "suppress_debug_info", False)
    monkeypatch.setattr(litellm, "telemetry", True)
    import_litellm_quietly()
    # The only word that LiteLLM takes for yes.
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert litellm.suppress_debug_info is True
    assert litellm.telemetry is False


def test_whoever_wants_the_latest_price_list_can_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "False")
    import_litellm_quietly()
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "False"


@pytest.mark.parametrize(
    ("listed", "limit"), [(128_000, 128_000), (1, 1), (0, None), (-1, None), (None, None), ("128000", None)]
)
def test_a_limit_is_a_number_of_tokens_or_not_known(
    monkeypatch: pytest.MonkeyPatch, listed: object, limit: int | None
) -> None:
    row = {"max_input_tokens": listed, "max_output_tokens": 7}
    table = SimpleNamespace(get_model_info=lambda model: {"key": model}, model_cost={"openai/m": row})
    monkeypatch.setattr(tokens, "import_litellm_quietly", lambda: table)
    assert model_limit("openai/m", "max_input_tokens") == limit
    assert model_limit("openai/m", "max_output_tokens") == 7


def test_the_price_file_is_read_as_litellm_reads_it() -> None:
    """For every chat model of the table, under its name and under its provider's prefix."""
    litellm = import_litellm_quietly()
    others = []
    for name, row in tokens._table().items():
        provider = row.get("litellm_provider")
        if row.get("mode") != "chat" or name == "sample_spec" or provider not in litellm.provider_list:
            continue
        for asked in {name, name if "/" in name else f"{provider}/{name}"}:
            try:
                theirs = litellm.model_cost[litellm.get_model_info(asked)["key"]]
            except Exception:
                continue
            if any(theirs.get(field) != value for field, value in litellm_model_info(asked).items()):
                others.append(asked)
    assert others == []


def test_a_dry_run_does_without_litellm() -> None:
    code = (
        "import sys; from draco_ray.cli import main\n"
        "try: main(['judge', 'examples/traces', '--judge', 'anthropic/claude-sonnet-4-5', '--dry-run'])\n"
        "except SystemExit: print('imported' if 'litellm' in sys.modules else 'not imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.splitlines()[-1] == "not imported"


class Table:
    """Of LiteLLM what is asked of a temperature: model ``cold`` takes 1 alone, provider ``nobody`` is not known."""

    class UnsupportedParamsError(Exception): ...

    class BadRequestError(Exception): ...

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.utils = self

    def get_llm_provider(self, model: str, *, api_base: str | None) -> tuple[str, str, None, None]:
        provider, _, name = model.partition("/")
        self.asked.append(api_base)
        if provider == "nobody":
            raise self.BadRequestError
        return name, provider, None, None

    def get_optional_params(self, *, model: str, custom_llm_provider: str, temperature: float) -> None:
        self.asked.append((model, custom_llm_provider, temperature))
        if model == "cold" and temperature != 1.0:
            raise self.UnsupportedParamsError


@pytest.mark.parametrize(
    ("model", "temperature", "refuses"),
    [("p/cold", 0.1, True), ("p/cold", 1.0, False), ("p/warm", 0.1, False), ("nobody/cold", 0.1, False)],
)
def test_a_temperature_is_refused_where_it_is_known_to_be(
    monkeypatch: pytest.MonkeyPatch, model: str, temperature: float, refuses: bool
) -> None:
    table = Table()
    monkeypatch.setattr(tokens, "import_litellm_quietly", lambda: table)
    assert (refused_parameters(model, "http://own", temperature=temperature) is not None) is refuses
    asked = [] if model == "nobody/cold" else [(model[2:], "p", temperature)]
    assert table.asked == ["http://own", *asked]
