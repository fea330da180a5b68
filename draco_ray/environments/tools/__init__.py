"""Tasks in JSONL and tools as typed Python functions or MCP servers: an environment without a class of one's own."""
