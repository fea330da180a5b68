"""The agent's prompt: a template file filled in for a task.

A line ``--- user ---`` parts the system message from the user message; without it all of it is the user message.
Placeholders: ``{task_description}``, and ``{name}`` for every field of the task; AppWorld's are
``{supervisor_first_name}``, ``{supervisor_last_name}``, ``{supervisor_email}`` and ``{supervisor_phone_number}``. Any
other brace is text.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from draco_ray.config.load import project_file
from draco_ray.errors import ConfigError
from draco_ray.records import Message, Task

SPLIT = "--- user ---"

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def find_prompt(path: Path) -> Path:
    """The template file of a prompt path of the configuration, found as `project_file` does.

    Raises: ConfigError when there is none.
    """
    with contextlib.suppress(ConfigError):
        path = project_file(path)
    if path.is_file():
        return path
    raise ConfigError(
        f"no agent prompt at {str(path)!r}: agent.prompt names a template file such as prompts/agent_think.txt"
    )


def agent_template(chosen: Path | None, own: Path | str) -> str:
    """The text of the agent's template.

    Args:
        chosen: ``agent.prompt``.
        own: the environment's (`draco_ray.environments.base.Environment.agent_prompt`), for where that is null.

    Raises: ConfigError when the template is missing, or has no place for the task.
    """
    source = own if chosen is None else chosen
    template = source if isinstance(source, str) else find_prompt(source).read_text(encoding="utf-8")
    if "{task_description}" not in template:
        name = repr(str(source)) if isinstance(source, Path) else "of the environment"
        raise ConfigError(f"agent prompt {name} has no {{task_description}}: the agent would not know its task")
    return template


def render_agent_prompt(path: Path, task: Task) -> tuple[Message, ...]:
    """`fill_agent_prompt` with the template in a file. Raises: as `agent_template`."""
    return fill_agent_prompt(agent_template(path, path), task)


def fill_agent_prompt(template: str, task: Task) -> tuple[Message, ...]:
    """The messages that open an episode.

    All placeholders are filled in one pass over the template, so one inside an instruction stays text, and so does
    a split line.
    """
    values = {**task.fields, "task_description": task.instruction}
    parts = re.split(rf"^{re.escape(SPLIT)}$\n?", template, maxsplit=1, flags=re.MULTILINE)
    filled = [_PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), part).strip() for part in parts]
    if len(filled) == 1:
        return (Message(role="user", content=filled[0]),)
    return (Message(role="system", content=filled[0]), Message(role="user", content=filled[1]))
