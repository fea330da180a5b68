"""Writes demonstrations of a taskset for `draco sft`: a clerk, or a player of Hangman, who makes mistakes.

    .venv-verifiers/bin/python examples/parcels/demonstrations.py parcels FILE     # or: hangman

The starter policy, a stand-in for a pretrained model, is trained on them. They use training tasks only.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
import yaml
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

HERE = Path(__file__).parent
DEMONSTRATIONS = 600
KNOWS = 0.6
"""Probability that the clerk follows the rules of the house."""
REPEATS, RARE = 0.15, 0.2
"""Probabilities that the player repeats a letter, and that it guesses a rare one."""
COMMON, OTHERS = "ETAOINSR", "DLUCMPHG"


def clerk(task: vf.Task, chance: random.Random) -> Iterator[tuple[str, str]]:
    """A shelf for every parcel; sometimes it is wrong, or does not exist."""
    from parcels import SHELF, answer, question

    asked = question(task.data.parcels[0])
    for number, parcel in enumerate(task.data.parcels, start=1):
        right = SHELF[parcel.rsplit(" ", 1)[0]]
        shelf = right if chance.random() < KNOWS else chance.choice("ABCD")
        yield asked, shelf
        asked = answer(shelf, task.data.parcels[number]) if number < len(task.data.parcels) else ""


def begun(task: vf.Task) -> Any:
    """The game of a task, as verifiers begins it."""
    import textarena

    random.seed(task.data.info["seed"])
    game = textarena.make(env_id=task.data.info["game"])
    game.reset(num_players=1)
    return game


def player(task: vf.Task, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Letters in brackets, played in the real game."""
    from verifiers.v1.tasksets.textarena.taskset import _latest_feedback

    game = begun(task)
    asked, guessed = task.data.prompt, ""
    while not game.state.done:
        rare = chance.random() < RARE
        left = [letter for letter in (OTHERS if rare else COMMON) if letter not in guessed]
        again = guessed and (not left or chance.random() < REPEATS)
        # Guess common letters in a fixed order: a small model learns an order, but hardly which letters are left.
        letter = chance.choice(guessed if again else left if rare else left[0])
        guessed += letter
        yield asked, f"[{letter}]"
        game.step(f"[{letter}]")
        if not game.state.done:
            asked = _latest_feedback(str(game.get_observation()[1]))


SPEAKERS = {"parcels": clerk, "hangman": player}


def conversation(task: vf.Task, turns: Iterator[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages of a task."""
    system = task.data.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    for asked, said in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return messages


def tasks_of(name: str, split: str) -> list[vf.Task]:
    """The tasks of a split of the example's YAML file."""
    sys.path.insert(0, str(HERE))
    options = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))["environment"]["options"]
    chosen = options["taskset"] | {"id": Path(options["taskset"]["id"]).stem}
    taskset = load_taskset(taskset_config_type(chosen["id"]).model_validate(chosen))
    return list(taskset.select(SelectConfig.model_validate(options["splits"][split])))


def main(name: str, file: Path) -> None:
    """Write the file."""
    tasks, chance = tasks_of(name, "train"), random.Random(0)
    told = [tasks[number % len(tasks)] for number in range(DEMONSTRATIONS)]
    lines = [{"messages": conversation(task, SPEAKERS[name](task, chance))} for task in told]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
