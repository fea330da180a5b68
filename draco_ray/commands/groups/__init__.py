"""The commands and their options, a module for each panel of ``draco --help``; `draco_ray.cli` assembles them."""
