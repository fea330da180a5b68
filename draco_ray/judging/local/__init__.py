"""The judge model on the run's own cluster, served by vLLM."""
