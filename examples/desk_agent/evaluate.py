"""Says whether a task was done: the order was looked up first, and became what the policy says."""

from __future__ import annotations

import json
import sys

given = json.load(sys.stdin)
try:
    output = json.loads(given["output"])
except ValueError:
    output = {"looked_up": False, "became": None}
met = {
    "looked up": bool(output["looked_up"]),
    "decided by the policy": output["became"] == given["task"]["expected"],
}
print(json.dumps(met))
sys.exit(not all(met.values()))
