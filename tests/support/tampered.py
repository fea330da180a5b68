"""Copies of a run with one change, whose digests are updated to match."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pyarrow as pa

from draco_ray.runs.checkpoints import ADAPTER, COUNTERS, file_digest
from draco_ray.runs.directory import RunDirectory
from draco_ray.runs.manifest import MANIFEST_FILE
from draco_ray.runs.schema import TABLE_SCHEMAS
from draco_ray.runs.store import write_parquet

KINDS = ("verdict", "reply", "token", "adapter")


def tampered(run: RunDirectory, to: Path, kind: str, seed: int) -> tuple[RunDirectory, str]:
    """A copy with one random change of that kind.

    Returns: the copy, and a regular expression for the line that must name the change.
    """
    shutil.copytree(run.path, to)
    copy, chance = RunDirectory(to), random.Random(f"{kind}{seed}")
    step = chance.choice(copy.checkpoint_steps())
    changed = {"verdict": _verdict, "reply": _reply, "token": _token, "adapter": _adapter}[kind]
    return copy, changed(copy, step, chance)


def with_right_digests(run: RunDirectory, path: Path) -> None:
    """Write the digest of a changed file into the manifest, and that of a checkpoint's file into its counters."""
    manifest = json.loads((run.path / MANIFEST_FILE).read_text())
    changed = [path]
    if path.parent.parent == run.checkpoints:
        counters = path.with_name(COUNTERS)
        tree = json.loads(counters.read_text())
        tree["sha256"][path.name] = file_digest(path)[0]
        counters.write_text(json.dumps(tree))
        changed.append(counters)
    for each in changed:
        manifest["files"][str(each.relative_to(run.path))] = file_digest(each)[0]
    (run.path / MANIFEST_FILE).write_text(json.dumps(manifest))


def _verdict(run: RunDirectory, step: int, chance: random.Random) -> str:
    """Change a verdict in the table."""
    rows = run.table("verdicts", step).to_pylist()
    row = chance.choice(rows)
    row["verdict"] = chance.choice([each for each in (-1, 0, 1) if each != row["verdict"]])
    _write(run, "verdicts", step, rows)
    where = f"task {row['task_id']}, rollout {row['rollout']}, criterion {row['criterion']}"
    return f"step {step}, {where}: verdicts.verdict is {row['verdict']}, recomputed"


def _reply(run: RunDirectory, step: int, chance: random.Random) -> str:
    """Change a verdict in the judge's reply."""
    rows = run.table("judge_calls", step).to_pylist()
    row = chance.choice([row for row in rows if row["phase"] == "score"])
    found = chance.choice(list(re.finditer(r'("score": )(-?[01])', row["reply"])))
    other = chance.choice([each for each in ("-1", "0", "1") if each != found[2]])
    row["reply"] = row["reply"][: found.start(2)] + other + row["reply"][found.end(2) :]
    _write(run, "judge_calls", step, rows)
    where = f"step {step}, task {row['task_id']}, rollout {row['rollout']}, criterion"
    return rf"{where} \d+: verdicts\.verdict is {found[2]}, recomputed from the stored replies {other}"


def _token(run: RunDirectory, step: int, chance: random.Random) -> str:
    """Change a sampled token."""
    rows = run.table("trajectories", step).to_pylist()
    row = chance.choice(rows)
    at = chance.choice([at for at, sampled in enumerate(row["sampled"]) if sampled])
    known = {token for each in rows for token in each["token_ids"]}
    row["token_ids"][at] = chance.choice(sorted(known - {row["token_ids"][at]}))
    _write(run, "trajectories", step, rows)
    return rf"step {step}, task {row['task_id']}, rollout {row['rollout']}, branch 0: sampled token {at} \(id"


def _adapter(run: RunDirectory, step: int, chance: random.Random) -> str:
    """Change one byte of an adapter's values, which stay finite."""
    path = run.checkpoint(step) / ADAPTER
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    # The lowest bytes of a float32 hold digits, and no exponent.
    at = header + 4 * chance.randrange((len(data) - header) // 4) + chance.randrange(2)
    data[at] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    with_right_digests(run, path)
    return rf"step{step:05d}/{ADAPTER}: tensor \S+\[\d+, \d+\] is .*, recomputed .* \(1 of \d+ values differ\)"


def _write(run: RunDirectory, table: str, step: int, rows: list[dict[str, object]]) -> None:
    path = run.tables / table / f"step{step:05d}.parquet"
    write_parquet(path, pa.Table.from_pylist(rows, schema=TABLE_SCHEMAS[table]))
    with_right_digests(run, path)
