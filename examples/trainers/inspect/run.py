"""A task of Inspect that the judge scores, then a scan of its logs by Scout; needs inspect_scout and OPENAI_API_KEY.

python examples/trainers/inspect/run.py openai/gpt-5.4-mini
"""

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate
from inspect_scout import scan, transcripts_from

from draco_ray.adapters.inspect_scorer import draco_scanner, draco_scorer

TASKS = ("Name three primes above 100 and explain each.", "Plan a two-day visit to Lisbon.")

if __name__ == "__main__":
    samples = [Sample(id=number, input=task) for number, task in enumerate(TASKS)]
    scorer = draco_scorer("openai/gpt-5.4", budget=5.0)
    eval(Task(dataset=samples, solver=generate(), scorer=scorer), model=sys.argv[1], log_dir="logs")
    scan([draco_scanner("openai/gpt-5.4", budget=5.0)], transcripts=transcripts_from("logs"))
