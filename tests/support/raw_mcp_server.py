"""An MCP server without the package: it prints lines outside the protocol, and answers with more than texts.

``silent`` as its argument: it never answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"$ref": 5}, "b": True}}
RESULTS: dict[str, Any] = {
    "embedded": {"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]},
    "linked": {"content": [{"type": "resource_link", "uri": "file:///b", "name": "b"}]},
    "structured": {"content": [], "structuredContent": {"orders": ["A1"]}},
    "misfitting": {"content": [{"type": "text", "text": "5"}], "structuredContent": {"orders": 5}},
    "unstructured": {"content": [{"type": "text", "text": "5"}]},
    "malformed": {"content": 5},
    "halved": {"content": [{"type": "text", "text": "a\ud83d \U0001f600 \\ud83d"}]},
    "no_utf8": {"content": [{"type": "text", "text": "a\xff"}]},
    "slow": {},
    "end": {},
}
OUTPUT = {"type": "object", "properties": {"orders": {"type": "array"}}}
"""Output schema that two of the tools declare but do not follow."""


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of one request."""
    if method == "initialize":
        server = {"name": "raw", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        promised = {name: {"outputSchema": OUTPUT} for name in ("misfitting", "unstructured")}
        return {"tools": [{"name": name, "inputSchema": SCHEMA, **promised.get(name, {})} for name in RESULTS]}
    if method != "tools/call":
        return {}
    if params["name"] == "end":
        os._exit(3)
    if params["name"] == "slow":
        time.sleep(600)
    result: dict[str, Any] = RESULTS[params["name"]]
    return result


if __name__ == "__main__":
    if sys.argv[1:] == ["silent"]:
        time.sleep(600)
    print("Welcome!\n{not json", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            told = {"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked["method"], asked.get("params") or {})}
            if told["result"] is RESULTS["no_utf8"]:
                sys.stdout.buffer.write(json.dumps(told, ensure_ascii=False).encode("latin-1") + b"\n")
                sys.stdout.flush()
                continue
            print(json.dumps(told), flush=True)
