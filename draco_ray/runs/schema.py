"""The tables of a run directory, one Arrow schema each.

Keys shared by the tables: ``training_step`` (1-based), ``task_id``, ``rollout`` (0-based index in the group),
``criterion`` (0-based index in the group's rubric), ``step`` (1-based agent step).
"""

from __future__ import annotations

import pyarrow as pa

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_COLUMNS = {
    "trajectories": """
        training_step int32!, task_id string!, rollout int32!, attempt int32!, policy_version int32!,
        prompt messages!, token_ids int32[]!, sampled bool[]!, logprob float32[]!, token_step int32[]!,
        prompt_length int32!, turns int32!, steps int32!, ended string!, error string, engine string,
        started_at float64!, ended_at float64!, termination string, branches int32[]!, scenario string!""",
    "steps": """
        training_step int32!, task_id string!, rollout int32!, turn int32!, step int32, text string!, action string,
        observation string, first_token int32!, last_token int32!, seconds_generating float64!,
        seconds_executing float64!, role string!, branch int32!, policy_version int32""",
    "criteria": """
        training_step int32!, task_id string!, criterion int32!, title string!, description string!,
        evaluator_instruction string, source string, survived bool""",
    "proposals": """
        training_step int32!, task_id string!, title string!, description string!, evaluator_instruction string,
        source string""",
    "verdicts": """
        training_step int32!, task_id string!, rollout int32!, criterion int32!, verdict int8!, evidence string,
        justification string""",
    "citations": """
        training_step int32!, task_id string!, rollout int32!, criterion int32!, verdict int8!, step int32,
        explanation string""",
    "advantages": """
        training_step int32!, task_id string!, rollout int32!, reward float64!, advantage float64!,
        quality float64[]!, cited bool[]!, step_advantage float64[]!, step_tokens int32[]!, fallback string!,
        inert bool!""",
    "judge_calls": """
        training_step int32!, task_id string!, rollout int32, call_id string!, phase string!, model string!,
        prompt string!, reply string!, finish_reason string!, input_tokens int64!, cached_tokens int64!,
        output_tokens int64!, dollars float64!, started_at float64!, seconds float64!, requests int32!, error string,
        reasoning_tokens int64!, estimated_dollars float64!, waited_seconds float64!""",
    "groups": """
        training_step int32!, task_id string!, state string!, rollouts int32!, lost int32!, unscored int32,
        credit_failures int32, reason string""",
    "spans": """
        training_step int32!, task_id string, rollout int32, stage string!, started_at float64!, ended_at float64!""",
    "evaluations": """
        training_step int32!, split string!, task_id string!, run int32!, success bool!, passed_tests int32!,
        total_tests int32!, turns int32!, ended string!, difficulty int32, failures string[], termination string,
        scenario string!, reward float64""",
    "heldout_verdicts": """
        training_step int32!, split string!, task_id string!, run int32!, scenario string!, criteria string[],
        verdicts int8[], again int8[], error string""",
    "outcomes": """
        training_step int32!, task_id string!, rollout int32!, success bool!, passed_tests int32, total_tests int32,
        failures string[], reward float64""",
}
"""Table -> its columns, each a name and a type. ``[]`` marks a list, ``!`` a column that is never null."""


def _columns(table: str) -> list[tuple[str, str]]:
    pairs = (column.split() for column in _COLUMNS[table].split(","))
    return [(name, kind) for name, kind in pairs]


def _type(kind: str) -> pa.DataType:
    name = kind.removesuffix("!")
    if name.endswith("[]"):
        return pa.list_(_type(name.removesuffix("[]")))
    return _MESSAGES if name == "messages" else pa.type_for_alias(name)


TABLE_SCHEMAS = {table: pa.schema([(name, _type(kind)) for name, kind in _columns(table)]) for table in _COLUMNS}
"""Table -> schema. A null ``rollout`` marks a row about the whole task or group."""
REQUIRED = {table: frozenset(name for name, kind in _columns(table) if kind.endswith("!")) for table in _COLUMNS}
"""Table -> columns that are never null."""

for _name, _like in {
    # Evaluated rollouts: ``rollout`` is the index of the run of the task, and training step 0 is the untrained policy.
    "evaluation_trajectories": "trajectories",
    "evaluation_steps": "steps",
    # Judge calls about held-out rollouts, which belong to no training step.
    "heldout_calls": "judge_calls",
}.items():
    TABLE_SCHEMAS[_name], REQUIRED[_name] = TABLE_SCHEMAS[_like], REQUIRED[_like]

STEP_TABLES = tuple(name for name in TABLE_SCHEMAS if not name.startswith(("evaluation", "heldout")))
"""Tables that a training step writes. The others hold measurements of a step's policy, perhaps made much later."""

STRUCTURED_METRICS = frozenset(
    {
        "solved_tasks",
        "updates_skipped",
        "ended",
        "credit_fallbacks",
        "judge",
        "task_pass_rates",
        "held_out_pairs",
        "held_out_best",
        "held_out_trained_best",
    }
)
"""Metrics that are lists or mappings. All others are numbers or null."""
