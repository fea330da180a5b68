"""Author a static rubric on the Ray cluster this job was submitted to.

ray job submit --working-dir . -- python jobs/static_rubric.py sandbox --out rubric.yaml --tasks 10
"""

import sys

from draco_ray.cli import main

if __name__ == "__main__":
    main(["rubric", "author", *sys.argv[1:]])
