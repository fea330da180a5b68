"""An environment of JSONL tasks and tools, which are typed Python functions or MCP servers."""
