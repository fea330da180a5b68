"""Benchmarks with an evaluator and an environment of their own."""
