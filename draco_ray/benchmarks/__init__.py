"""Benchmarks that bring their own evaluator and environment."""
