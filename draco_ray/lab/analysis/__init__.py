"""What a run's tables say: tidy tables, one row an observation, made from a run directory."""
