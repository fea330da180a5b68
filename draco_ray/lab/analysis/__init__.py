"""Analysis of a run directory: tidy tables with one row per observation."""
