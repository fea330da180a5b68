"""Trajectory -> verdict: the judge's phases over any LiteLLM model, its prompts, replies and costs."""
