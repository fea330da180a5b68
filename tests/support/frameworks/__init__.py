"""Agents on frameworks as users write them, each one file; `tests/integration/test_frameworks_real.py` runs them."""
