"""A policy that can answer a judge's prompt without having been trained: each token follows from the one before it.

Its weights are set by hand, so that attention and MLP add nothing and the head reads the next token off the embedding
of the last one. To any prompt it answers with one turn: a JSON array of one entry with the fields of every phase and a
code block. So it plays (one step per turn) and judges; the words of its evidence and the score are sampled. It stands
in for a policy that follows instructions, and everything around it is real.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.conftest import REPOSITORY
from tests.support.tiny_model import tiny_tokenizer

POSITIONS = 65536
VOCABULARY = 2048
HIDDEN = 128
PASSES = 0.7
"""Probability that a score is 1 instead of -1 at the judge's temperature of 0.1."""
TITLE = "Calls the API"
FIELDS = {
    "title": TITLE,
    "description": "It calls the API.",
    "evaluator_instruction": "PASS if a call is seen, FAIL otherwise.",
    "rubric_title": TITLE,
    "rubric_index": 0,
    "justification": "As it reads.",
    "relevant_steps": [1],
    "explanation": "<code>print(1)</code>",
}
OPENING = f'[{json.dumps(FIELDS)[:-1]}, "evidence": '
EVIDENCE = ('"Step 1."', '"The first step."', '"print(1)"', '"Its code."')
SCORE = ', "score": '
PASS, FAIL = '1, "verdict": "PASS"}]', '-1, "verdict": "FAIL"}]'
THOUGHT = "<think>I see it.</think>"
SURE = 10.0
"""Weight of the LM head for the required next token; 56 nats after the norm."""


def _tokenizer() -> PreTrainedTokenizerFast:
    # Learn from the judge's prompts too: with about a token per byte they would be three times as long.
    prompts = sorted((REPOSITORY / "prompts" / "judge").iterdir())
    tokenizer = tiny_tokenizer([file.read_text(encoding="utf-8") for file in prompts], VOCABULARY)
    pieces = (OPENING, *EVIDENCE, SCORE, PASS, FAIL, "<think>", "</think>", "I see it.", "\n\n")
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return tokenizer


def build_scripted_policy(directory: Path) -> Path:
    """Save the model and its tokenizer in ``directory``. Returns the directory."""
    tokenizer = _tokenizer()

    def token(piece: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(piece))

    line_break = tokenizer.encode("\n", add_special_tokens=False)[-1]
    branch = math.log(PASSES / (1 - PASSES)) * 0.1 / math.sqrt(HIDDEN)
    # Token -> tokens that may follow. The template ends a prompt with a line break, or two after an empty think block.
    follows = {
        line_break: {token("<think>"): SURE},
        token("<think>"): {token("I see it."): SURE},
        token("I see it."): {token("</think>"): SURE},
        token("</think>"): {token(OPENING): SURE},
        token("\n\n"): {token(OPENING): SURE},
        token(OPENING): {token(words): SURE for words in EVIDENCE},
        **{token(words): {token(SCORE): SURE} for words in EVIDENCE},
        token(SCORE): {token(PASS): SURE + branch, token(FAIL): SURE},
        token(PASS): {token("<|im_end|>"): SURE},
        token(FAIL): {token("<|im_end|>"): SURE},
    }
    return save_bigram_policy(directory, tokenizer, follows)


def save_turns_policy(
    directory: Path, tokenizer: PreTrainedTokenizerFast, turns: Mapping[str, float], *, before: Sequence[str] = ("\n",)
) -> Path:
    """Save a model that draws one of a few whole turns, each of which is a token.

    Args:
        directory: folder for the model and its tokenizer.
        tokenizer: tokenizer of its prompts; the turns are added to it.
        turns: turn -> its weight in the draw.
        before: tokens with which a prompt may end.
    Returns: the directory.
    """
    tokenizer.add_tokens([AddedToken(turn, special=False, normalized=False) for turn in turns])

    def token(piece: str) -> int:
        return int(tokenizer.encode(piece, add_special_tokens=False)[-1])

    most = max(turns.values())
    draws = {token(turn): SURE + math.log(chance / most) / math.sqrt(HIDDEN) for turn, chance in turns.items()}
    follows = {token(last): draws for last in before}
    follows |= {turn: {token("<|im_end|>"): SURE} for turn in draws}
    # If rows of the head were equal, training could not make one turn more likely than another.
    follows |= {token(letter): {turn: SURE} for letter, turn in zip("abcdefgh", draws, strict=False)}
    return save_bigram_policy(directory, tokenizer, follows)


def save_bigram_policy(
    directory: Path, tokenizer: PreTrainedTokenizerFast, follows: Mapping[int, Mapping[int, float]]
) -> Path:
    """Save a model whose next token depends on the last one alone.

    Args:
        directory: folder for the model and its tokenizer.
        tokenizer: has the tokens ``<|im_end|>`` and ``<|endoftext|>``.
        follows: token -> tokens that may follow it -> the head's weight for each.
    Returns: the directory.
    """

    def token(piece: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(piece))

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=token("<|im_end|>"),
        pad_token_id=token("<|endoftext|>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        (layer,) = model.model.layers
        for silent in (layer.self_attn.o_proj, layer.mlp.down_proj, model.model.embed_tokens, model.lm_head):
            silent.weight.zero_()
        # All tokens without a required successor share the first direction.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for direction, (last, following) in enumerate(follows.items(), start=1):
            model.model.embed_tokens.weight[last, 0] = 0.0
            model.model.embed_tokens.weight[last, direction] = 1.0
            for next_token, weight in following.items():
                model.lm_head.weight[next_token, direction] = weight
    model.generation_config = GenerationConfig(eos_token_id=[token("<|im_end|>")], pad_token_id=config.pad_token_id)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
