"""`ray`, but its nodes have minutes to come up, and fork their workers as the Ray that `draco train` starts does.

python -m tests.support.forking_ray engines,judges,learners start --block ...: what runs on the node is said first.

A new interpreter imports PyTorch, vLLM, LiteLLM and Ray Train once more for each worker, which is most of what a short
run on a cluster costs. Users' clusters do that: `tests.e2e.test_ray_job` trains with such workers.
"""

from __future__ import annotations

import sys

ENGINES, JUDGES, LEARNERS = "engines", "judges", "learners"
EVERYTHING = f"{ENGINES},{JUDGES},{LEARNERS}"


def main() -> None:
    """Do what the command line says. The block ends with this process: `ray start` has to be told ``--block``."""
    from ray.scripts.scripts import main as ray

    from draco_ray.config.load import load_config
    from draco_ray.engine.vllm_engine import vllm_environment
    from draco_ray.training.cluster import ACTORS, OF_ENGINES, OF_JUDGES, OF_LEARNERS, _patient_start
    from draco_ray.workers.forked import forked_workers

    parts = sys.argv.pop(1).split(",")
    modules_of = {ENGINES: OF_ENGINES, JUDGES: OF_JUDGES, LEARNERS: OF_LEARNERS}
    modules = [*ACTORS, *(module for part in parts for module in modules_of[part])]
    config = load_config("sandbox", [])
    environment = vllm_environment(config.engine, config.model) if ENGINES in parts else {}
    with _patient_start(), forked_workers(modules, environment):
        ray()


if __name__ == "__main__":
    main()
