"""How large the report of a long run is, and how soon it opens.

    python -m tests.support.bench_report runs/NAME --rollouts 10000

A recorded run's training steps are repeated up to this number of rollouts; their page is written and opened in a
headless browser. ``--text-kib`` adds that much made-up text to each rollout's outputs, as of a longer task. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from draco_ray.lab.report.page import write_report
from draco_ray.runs.directory import RunDirectory
from tests.support.browser import Browser, find_browser

OPENINGS = 5
WORDS = ("blue", "song", "night", "river", "payment", "dinner", "rent", "taxi", "summer", "letter", "garden", "coffee")


def longer(rows: pa.Table, kib: float, rng: random.Random) -> pa.Table:
    """The ``steps`` table with more output, in records as an API lists them; turns without output stay as they are."""
    ran = [output is not None for output in rows.column("observation").to_pylist()]
    rollouts = len({(row["task_id"], row["rollout"]) for row in rows.select(["task_id", "rollout"]).to_pylist()})
    characters = 1024 * kib * rollouts / max(1, sum(ran))

    def more(output: str) -> str:
        lines = [output]
        while sum(map(len, lines)) < characters:
            name = " ".join(rng.choices(WORDS, k=3))
            lines.append(f"{{'id': {rng.randrange(100_000)}, 'title': '{name}', 'rating': {rng.random():.2f}}}")
        return "\n".join(lines)

    outputs = [None if output is None else more(output) for output in rows.column("observation").to_pylist()]
    place = rows.column_names.index("observation")
    return rows.set_column(place, rows.schema.field(place), pa.array(outputs, rows.schema.field(place).type))


def repeated(run: RunDirectory, path: Path, rollouts: int, kib: float) -> tuple[RunDirectory, int]:
    """A run directory with the repeated steps of ``run``, and its number of rollouts."""
    path.mkdir()
    rng = random.Random(0)
    shutil.copy(run.path / "config.yaml", path)
    metrics = {int(line["step"]): line for line in run.metrics()}
    held, lines = 0, []
    for number, source in enumerate(itertools.cycle(run.steps()), start=1):
        if held >= rollouts:
            break
        for folder in sorted(run.tables.iterdir()):
            rows = run.table(folder.name, source)
            if rows.num_rows:
                place = rows.column_names.index("training_step")
                field = rows.schema.field(place)
                rows = rows.set_column(place, field, pa.array([number] * rows.num_rows, field.type))
                if folder.name == "steps" and kib:
                    rows = longer(rows, kib, rng)
                target = path / "tables" / folder.name
                target.mkdir(parents=True, exist_ok=True)
                pq.write_table(rows, target / f"step{number:05d}.parquet", compression="zstd")
        held += run.table("trajectories", source, ["rollout"]).num_rows
        lines.append(json.dumps({**metrics.get(source, {}), "step": number}))
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunDirectory.open(path), held


def main() -> None:
    """Repeat, write, open, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--text-kib", type=float, default=0.0)
    arguments = parser.parse_args()
    program = find_browser()
    assert program is not None, "no browser on PATH; name one with DRACO_TEST_BROWSER"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run, held = repeated(
            RunDirectory.open(arguments.run.resolve()), folder / "run", arguments.rollouts, arguments.text_kib
        )
        page = folder / "report.html"
        began = time.perf_counter()
        write_report(run, page)
        writing = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        last = run.steps()[-1]
        task = min(run.table("trajectories", last, ["task_id"]).column("task_id").to_pylist())
        places = {"": "#overview", "#groups": "#groups", f"#rollout/{last}/{task}/0": f"#rollout/{last}/{task}/0"}
        seconds: dict[str, list[float]] = {place: [] for place in places}
        with Browser(program, folder) as browser:
            for _ in range(OPENINGS):
                for place, ready in places.items():
                    browser.goto("about:blank")
                    browser.wait("location.href === 'about:blank'")
                    began = time.perf_counter()
                    browser.goto(page.as_uri() + place)
                    browser.wait(f"document.body?.dataset.ready === {json.dumps(ready)}")
                    seconds[place].append(time.perf_counter() - began)
        cells = [
            f"{held:,}",
            str(last),
            f"{page.stat().st_size / 2**20:.1f} MiB",
            f"{writing:.0f} s",
            f"{memory:.0f} MiB",
        ]
        cells += [f"{statistics.median(found):.2f} s" for found in seconds.values()]
        print("| rollouts | steps | page | written in | peak memory | overview open | groups open | a rollout open |")
        print("|---|---|---|---|---|---|---|---|")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
