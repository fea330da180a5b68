"""DRACO (Distributing Rubric-based Advantage for Credit Optimization) as a distributed Ray pipeline.

Importing this package imports nothing heavy: its configuration and records also serve the AppWorld environment,
which lives in a virtual environment of its own.
"""
