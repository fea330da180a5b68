"""``environment.options`` of ``environment.use: tools``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from draco_ray.config.schema import ConfigSection
from draco_ray.environments.base import checked_options
from draco_ray.errors import ConfigError


class McpServerOptions(ConfigSection):
    """An MCP server: a command that uses standard input and output, or the URL of a running server."""

    command: tuple[str, ...] = ()
    """Command line of a server that is started in the jail for every rollout."""
    reads: tuple[Path, ...] = ()
    """Files and folders that the command may read."""
    url: str | None = None
    """URL of a server that uses streamable HTTP; one session per rollout."""
    tools: tuple[str, ...] = ()
    """Names of the tools to offer; empty: all."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers sent to the URL; ``{NAME}`` is replaced by the secret of that name."""

    @model_validator(mode="after")
    def _one_of_both(self) -> McpServerOptions:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected one of command and url")
        return self


class ToolsOptions(ConfigSection):
    """Options of the environment. In a configuration file, a path that begins with ``./`` is relative to the file."""

    tasks: str = ""
    """A JSONL file, or ``folder/file.py:function`` that returns such rows. A row has ``id``, ``instruction`` and, if
    needed, ``split`` (default: train), ``group``, ``expected`` (only ``evaluate`` sees it) and further fields.
    Empty: ``tasks.jsonl`` in data.root."""
    tools: tuple[Path, ...] = ()
    """Python files, in which every public function is a tool; ``reset(task)`` is called before a rollout,
    ``end_state()`` and ``evaluate(task, state)`` after it."""
    mcp: dict[str, McpServerOptions] = Field(default_factory=dict)
    """MCP servers by a name, which is used in messages."""
    secrets: tuple[str, ...] = ()
    """Environment variables that the tools get; their values are hidden from the policy."""
    reads: tuple[Path, ...] = ()
    """Files and folders that the tools may read besides their own file."""
    network: bool = False
    """Whether tools may use the network."""
    programs: bool = False
    """Whether tools may start programs; always true with ``network``."""
    facts: str = ""
    """Facts for the judge besides the tools, one list item per line, such as house rules and behaviour that no
    criterion may punish."""


def read_options(given: dict[str, Any]) -> ToolsOptions:
    """Check ``environment.options``. Raises: ConfigError, one line."""
    options = checked_options(ToolsOptions, given)
    if not options.tools and not options.mcp:
        raise ConfigError("environment.options: no tools given; list Python files in tools, or servers in mcp")
    servers = [path for server in options.mcp.values() for path in server.reads]
    for path in (*options.tools, *options.reads, *servers, *([Path(options.tasks)] if options.tasks else [])):
        # Workers may have another working directory.
        if not path.is_absolute():
            raise ConfigError(
                f"environment.options: {str(path)!r} is a relative path; give an absolute path, or in a configuration "
                "file begin it with ./, which means the file's folder"
            )
    if missing := [str(path) for path in (*options.tools, *options.reads, *servers) if not path.exists()]:
        raise ConfigError(f"environment.options: file {', '.join(missing)} does not exist")
    return options
