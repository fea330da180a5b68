"""The tables of a run directory, one Arrow schema each.

Keys shared by the tables: ``training_step`` (1-based), ``task_id``, ``rollout`` (0-based index in the group),
``criterion`` (0-based index in the group's rubric), ``step`` (1-based agent step).
"""

from __future__ import annotations

import pyarrow as pa

_KEYS = [("training_step", pa.int32()), ("task_id", pa.string())]
_ROLLOUT = [*_KEYS, ("rollout", pa.int32())]

TABLES: dict[str, pa.Schema] = {
    "trajectories": pa.schema(
        [
            *_ROLLOUT,
            ("attempt", pa.int32()),
            ("policy_version", pa.int32()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("token_ids", pa.list_(pa.int32())),
            ("sampled", pa.list_(pa.bool_())),
            ("logprob", pa.list_(pa.float32())),
            ("token_step", pa.list_(pa.int32())),
            ("prompt_length", pa.int32()),
            ("turns", pa.int32()),
            ("steps", pa.int32()),
            ("ended", pa.string()),
            ("error", pa.string()),
            ("engine", pa.string()),
            ("started_at", pa.float64()),
            ("ended_at", pa.float64()),
            ("termination", pa.string()),
            ("branches", pa.list_(pa.int32())),
            ("scenario", pa.string()),
        ]
    ),
    "steps": pa.schema(
        [
            *_ROLLOUT,
            ("turn", pa.int32()),
            ("step", pa.int32()),
            ("text", pa.string()),
            ("action", pa.string()),
            ("observation", pa.string()),
            ("first_token", pa.int32()),
            ("last_token", pa.int32()),
            ("seconds_generating", pa.float64()),
            ("seconds_executing", pa.float64()),
            ("role", pa.string()),
            ("branch", pa.int32()),
            ("policy_version", pa.int32()),
        ]
    ),
    "criteria": pa.schema(
        [
            *_KEYS,
            ("criterion", pa.int32()),
            ("title", pa.string()),
            ("description", pa.string()),
            ("evaluator_instruction", pa.string()),
            ("source", pa.string()),
            ("survived", pa.bool_()),
        ]
    ),
    "proposals": pa.schema(
        [
            *_KEYS,
            ("title", pa.string()),
            ("description", pa.string()),
            ("evaluator_instruction", pa.string()),
            ("source", pa.string()),
        ]
    ),
    "verdicts": pa.schema(
        [
            *_ROLLOUT,
            ("criterion", pa.int32()),
            ("verdict", pa.int8()),
            ("evidence", pa.string()),
            ("justification", pa.string()),
        ]
    ),
    "citations": pa.schema(
        [
            *_ROLLOUT,
            ("criterion", pa.int32()),
            ("verdict", pa.int8()),
            ("step", pa.int32()),
            ("explanation", pa.string()),
        ]
    ),
    "advantages": pa.schema(
        [
            *_ROLLOUT,
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("quality", pa.list_(pa.float64())),
            ("cited", pa.list_(pa.bool_())),
            ("step_advantage", pa.list_(pa.float64())),
            ("step_tokens", pa.list_(pa.int32())),
            ("fallback", pa.string()),
            ("inert", pa.bool_()),
        ]
    ),
    "judge_calls": pa.schema(
        [
            *_ROLLOUT,
            ("call_id", pa.string()),
            ("phase", pa.string()),
            ("model", pa.string()),
            ("prompt", pa.string()),
            ("reply", pa.string()),
            ("finish_reason", pa.string()),
            ("input_tokens", pa.int64()),
            ("cached_tokens", pa.int64()),
            ("output_tokens", pa.int64()),
            ("dollars", pa.float64()),
            ("started_at", pa.float64()),
            ("seconds", pa.float64()),
            ("requests", pa.int32()),
            ("error", pa.string()),
            ("reasoning_tokens", pa.int64()),
            ("estimated_dollars", pa.float64()),
            ("waited_seconds", pa.float64()),
        ]
    ),
    "groups": pa.schema(
        [
            *_KEYS,
            ("state", pa.string()),
            ("rollouts", pa.int32()),
            ("lost", pa.int32()),
            ("unscored", pa.int32()),
            ("credit_failures", pa.int32()),
            ("reason", pa.string()),
        ]
    ),
    "spans": pa.schema(
        [
            *_ROLLOUT,
            ("stage", pa.string()),
            ("started_at", pa.float64()),
            ("ended_at", pa.float64()),
        ]
    ),
    "evaluations": pa.schema(
        [
            ("training_step", pa.int32()),
            ("split", pa.string()),
            ("task_id", pa.string()),
            ("run", pa.int32()),
            ("success", pa.bool_()),
            ("passed_tests", pa.int32()),
            ("total_tests", pa.int32()),
            ("turns", pa.int32()),
            ("ended", pa.string()),
            ("difficulty", pa.int32()),
            ("failures", pa.list_(pa.string())),
            ("termination", pa.string()),
            ("scenario", pa.string()),
            ("reward", pa.float64()),
        ]
    ),
    "heldout_verdicts": pa.schema(
        [
            ("training_step", pa.int32()),
            ("split", pa.string()),
            ("task_id", pa.string()),
            ("run", pa.int32()),
            ("scenario", pa.string()),
            ("criteria", pa.list_(pa.string())),
            ("verdicts", pa.list_(pa.int8())),
            ("again", pa.list_(pa.int8())),
            ("error", pa.string()),
        ]
    ),
    "outcomes": pa.schema(
        [
            *_ROLLOUT,
            ("success", pa.bool_()),
            ("passed_tests", pa.int32()),
            ("total_tests", pa.int32()),
            ("failures", pa.list_(pa.string())),
            ("reward", pa.float64()),
        ]
    ),
}
"""Table name -> schema. A null ``rollout`` marks a row about the whole task or group."""

# Evaluated rollouts leave what trained ones do; ``rollout`` is then the run, and step 0 the untrained policy.
TABLES |= {"evaluation_trajectories": TABLES["trajectories"], "evaluation_steps": TABLES["steps"]}
# Calls about held-out rollouts belong to no training step.
TABLES |= {"heldout_calls": TABLES["judge_calls"]}

STEP_TABLES = tuple(name for name in TABLES if not name.startswith(("evaluation", "heldout")))
"""Tables of what a training step does. The others measure the policy of a step, also long after that has ended."""

REQUIRED: dict[str, frozenset[str]] = {
    "trajectories": frozenset(
        {"training_step", "task_id", "rollout", "policy_version", "prompt", "token_ids", "sampled"}
    )
    | {"logprob", "token_step", "prompt_length", "turns", "steps", "ended", "started_at", "ended_at"}
    | {"attempt", "branches", "scenario"},
    "steps": frozenset({"training_step", "task_id", "rollout", "turn", "text", "first_token", "last_token"})
    | {"seconds_generating", "seconds_executing", "role", "branch"},
    "criteria": frozenset({"training_step", "task_id", "criterion", "title", "description"}),
    "proposals": frozenset({"training_step", "task_id", "title", "description"}),
    "verdicts": frozenset({"training_step", "task_id", "rollout", "criterion", "verdict"}),
    "citations": frozenset({"training_step", "task_id", "rollout", "criterion", "verdict"}),
    "advantages": frozenset({"training_step", "task_id", "rollout", "reward", "advantage", "quality", "cited"})
    | {"step_advantage", "step_tokens", "fallback", "inert"},
    "judge_calls": frozenset({"training_step", "task_id", "phase", "model", "prompt", "reply", "input_tokens"})
    | {"cached_tokens", "output_tokens", "dollars", "started_at", "seconds", "requests"}
    | {"call_id", "finish_reason", "reasoning_tokens", "estimated_dollars", "waited_seconds"},
    "groups": frozenset({"training_step", "task_id", "state", "rollouts", "lost"}),
    "spans": frozenset({"training_step", "stage", "started_at", "ended_at"}),
    "evaluations": frozenset({"training_step", "split", "task_id", "run", "success", "turns", "ended"})
    | {"passed_tests", "total_tests", "scenario"},
    "heldout_verdicts": frozenset({"training_step", "split", "task_id", "run", "scenario"}),
    "outcomes": frozenset({"training_step", "task_id", "rollout", "success"}),
}
"""Columns that are never null: readers count on them."""
REQUIRED |= {"evaluation_trajectories": REQUIRED["trajectories"], "evaluation_steps": REQUIRED["steps"]}
REQUIRED |= {"heldout_calls": REQUIRED["judge_calls"]}

MOST = 1e15
"""Of an amount: beyond it sums would show nothing else, or could not be shown."""
AMOUNTS = frozenset({"input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "dollars"}) | {
    *("estimated_dollars", "requests", "seconds", "waited_seconds", "rollouts", "lost", "unscored", "credit_failures"),
    *("seconds_generating", "seconds_executing"),
}
"""Columns of counts, dollars and seconds."""
MEASURES = frozenset({"reward", "advantage", "started_at", "ended_at"})
"""Columns of numbers that may be negative."""

METRIC_LISTS = frozenset({"solved_tasks", "updates_skipped"})
"""Of a line of the metrics: lists of texts."""
METRIC_COUNTS = frozenset({"ended", "credit_fallbacks", "judge", "task_pass_rates"})
"""Mappings of names to numbers, or to such mappings. All else is a number, or null."""
