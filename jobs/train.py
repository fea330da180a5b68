"""Train on the Ray cluster this job was submitted to.

ray job submit --working-dir . -- python jobs/train.py sandbox train.steps=3
"""

import sys

from draco_ray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
