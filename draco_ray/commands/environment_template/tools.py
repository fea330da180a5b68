"""The tools: every public function is one; its type hints and docstring are what the model reads.

They run in a jail, each rollout in a process of its own, and see no file but this one (environment.options.reads).
"""

from __future__ import annotations

stock: dict[str, int] = {}


def reset(task: dict) -> None:
    """Called before a rollout; ``task`` is its row of tasks.jsonl."""
    stock.clear()
    stock.update(task["stock"])


def look_up(item: str) -> str:
    """Say how many of an item there are.

    Args:
        item: Its name, in the singular.
    """
    return f"{stock[item]} left" if item in stock else "no such item"


def sell(item: str, number: int = 1) -> str:
    """Sell some of an item.

    Args:
        item: Its name, in the singular.
        number: How many.
    """
    if stock.get(item, 0) < number:
        raise ValueError(f"only {stock.get(item, 0)} left")  # The model reads: error: sell: ValueError: only 0 left
    stock[item] -= number
    return "sold"


def end_state() -> dict[str, int]:
    """Called after a rollout, in the process of the tools. Returns the state that `evaluate` gets, as JSON."""
    return stock


def evaluate(task: dict, state: dict[str, int]) -> bool:
    """Called after `end_state`, only in evaluations, in a process where no tool has run. Returns whether the task is
    done. You may remove `end_state` and `evaluate`: evaluations then report the judge's pass rate instead."""
    return state == task["expected"]
