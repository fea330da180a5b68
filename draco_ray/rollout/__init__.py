"""Plays rollouts (environment + agent + engine -> trajectory): the agent loop, its worker, and the worker pool."""
