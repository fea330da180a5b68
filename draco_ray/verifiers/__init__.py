"""Tasksets and harnesses of the package `verifiers` as an environment and an agent (docs/verifiers.md)."""
