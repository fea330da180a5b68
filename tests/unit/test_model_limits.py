"""What LiteLLM's table says of a model, and that asking it fetches and prints nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from draco_ray.judging import model_limits
from draco_ray.judging.model_limits import model_limit, quiet_litellm


def test_the_price_list_is_the_packages_own_and_nothing_is_sent_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = quiet_litellm()
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP", raising=False)
    monkeypatch.setattr(litellm, "suppress_debug_info", False)
    monkeypatch.setattr(litellm, "telemetry", True)
    quiet_litellm()
    # The only word that LiteLLM takes for yes.
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert litellm.suppress_debug_info is True
    assert litellm.telemetry is False


def test_whoever_wants_the_latest_price_list_can_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "False")
    quiet_litellm()
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "False"


@pytest.mark.parametrize(
    ("listed", "limit"), [(128_000, 128_000), (1, 1), (0, None), (-1, None), (None, None), ("128000", None)]
)
def test_a_limit_is_a_number_of_tokens_or_not_known(
    monkeypatch: pytest.MonkeyPatch, listed: object, limit: int | None
) -> None:
    table = SimpleNamespace(get_model_info=lambda model: {"max_input_tokens": listed, "max_output_tokens": 7})
    monkeypatch.setattr(model_limits, "quiet_litellm", lambda: table)
    assert model_limit("openai/m", "max_input_tokens") == limit
    assert model_limit("openai/m", "max_output_tokens") == 7
