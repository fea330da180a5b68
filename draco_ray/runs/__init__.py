"""The run directory: writing it during a run, and reading it."""
