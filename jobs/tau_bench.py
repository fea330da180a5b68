"""Run τ-bench banking on the Ray cluster this job was submitted to; its entry point needs the policy's GPUs.

ray job submit --entrypoint-num-gpus 2 --working-dir . -- \
    python jobs/tau_bench.py qwen3.6-27b --policy runs/NAME/checkpoints/step00100 --out tau/draco

Keys reach the job through the cluster's own environment, not through --runtime-env-json, which Ray stores.
"""

import sys

from draco_ray.cli import main

if __name__ == "__main__":
    main(["tau", "run", *sys.argv[1:]])
