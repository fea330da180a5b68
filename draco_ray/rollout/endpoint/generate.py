"""vLLM's ``/inference/v1/generate``, for clients that tokenize messages themselves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from draco_ray.engine.sampler import Sample
from draco_ray.rollout.endpoint.fields import SAMPLING, check, count, text
from draco_ray.rollout.endpoint.turns import Json, Refused, TokenRequest

_KNOWN = {"token_ids", "sampling_params", "model", "request_id", "stream", "priority", "cache_salt"}
_KNOWN |= {"return_token_ids", "output_mode"}
_KNOWN_SAMPLING = {"max_tokens", "stop_token_ids", "detokenize", "skip_special_tokens", "output_kind"}
_KNOWN_SAMPLING |= {"spaces_between_special_tokens", "include_stop_str_in_output", "stop", "prompt_logprobs"}
_KNOWN_SAMPLING |= {"logprobs", "flat_logprobs", *SAMPLING}
# Start of the routing data of a mixture of experts: ignored here, but verifiers' client always sends it.
_KNOWN_SAMPLING |= {"routed_experts_prompt_start"}
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "stop": ([], ""),
    "prompt_logprobs": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stream": (False,),
    "output_mode": ("tokens",),
}


def read(body: Any) -> TokenRequest:
    """The request of a body. Raises: Refused."""
    check(body, _KNOWN, _NEUTRAL, set())
    parameters = body.get("sampling_params") or {}
    check(parameters, _KNOWN_SAMPLING, _NEUTRAL, set())
    return TokenRequest(
        token_ids=_token_ids(body, "token_ids"),
        max_tokens=count(parameters, "max_tokens"),
        stop_token_ids=frozenset(_token_ids(parameters, "stop_token_ids") if parameters.get("stop_token_ids") else ()),
        request_id=text(body.get("request_id") or "", "request_id"),
    )


def reply(request: TokenRequest, sample: Sample) -> Json:
    """The body of the answer."""
    logprobs: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": sample.token_ids,
        "logprobs": {"content": logprobs},
        "finish_reason": sample.finish_reason,
    }
    return {"request_id": request.request_id or f"gen-{secrets.token_hex(16)}", "choices": [choice]}


def _token_ids(body: Mapping[str, Any], name: str) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise Refused(f"{name}: expected a list of at least one token id")
    return ids
