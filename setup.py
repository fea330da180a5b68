"""Maps the top-level folder `prompts/` into the package, and makes the README one that the package index can show.

Everything else is in pyproject.toml.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup


def readme() -> str:
    """The README with links into the repository that ``REPOSITORY_URL`` names; without that, their text alone."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
    if url:
        text = re.sub(r"(!\[[^\]]*\])\((?!https?://)", rf"\1({url}/raw/HEAD/", text)
        return re.sub(r"\]\((?!https?://|#)", f"]({url}/blob/HEAD/", text)
    text = re.sub(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)|!\[[^\]]*\]\((?!https?://)[^)]*\)", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)", r"\1", text)


setup(
    packages=[*find_packages(include=["draco_ray*"]), "draco_ray.prompts"],
    package_dir={"draco_ray.prompts": "prompts"},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
