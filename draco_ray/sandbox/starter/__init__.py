"""The starter policy: a small Qwen3-architecture model trained on the spot on scripted sandbox rollouts."""

from draco_ray.sandbox.starter.build import build_starter
from draco_ray.sandbox.starter.settings import StarterSettings

__all__ = ["StarterSettings", "build_starter"]
