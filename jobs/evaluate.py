"""Evaluate on the Ray cluster this job was submitted to.

ray job submit --working-dir . -- python jobs/evaluate.py --run /shared/runs/NAME --last-epochs 3 --split test_normal
"""

import sys

from draco_ray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
