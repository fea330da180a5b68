"""Trajectory -> verdict: the judge's five phases over any LiteLLM model, its prompts, replies and costs."""
