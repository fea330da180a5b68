"""The command line, one file a group of commands; `draco_ray.cli` puts them together."""
