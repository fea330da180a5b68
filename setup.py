"""Maps the top-level folder `prompts/` into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["draco_ray*"]), "draco_ray.prompts"],
    package_dir={"draco_ray.prompts": "prompts"},
)
