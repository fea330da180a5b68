"""A scan of Inspect's logs by Scout whose scanner is ours."""

from __future__ import annotations

import tempfile

from tests.support.adapters import CannedCompleter, emit
from tests.support.adapters.inspect_score import booking


def main() -> None:
    """Print the results that Scout has kept."""
    from inspect_ai import eval
    from inspect_scout import scan, scan_results_df, transcripts_from

    from draco_ray.adapters.inspect_scorer import draco_scanner

    with tempfile.TemporaryDirectory() as folder:
        eval(booking(), model="mockllm/model", log_dir=f"{folder}/logs", display="none", log_realtime=False)
        status = scan(
            [draco_scanner("canned", complete=CannedCompleter())],
            transcripts=transcripts_from(f"{folder}/logs"),
            scans=f"{folder}/scans",
            display="none",
        )
        found = scan_results_df(status.location).scanners["draco"]
        emit(
            {
                "complete": status.complete,
                "results": {
                    row["transcript_task_id"]: {"value": row["value"], "metadata": row["metadata"]}
                    for row in found.to_dict("records")
                },
            }
        )


if __name__ == "__main__":
    main()
