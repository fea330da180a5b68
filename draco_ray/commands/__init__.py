"""Implementations of the commands; `draco_ray.commands.groups` declares them, and `draco_ray.cli` assembles them."""
