"""Verdict -> reward -> group advantage -> step advantage: the method itself, in NumPy, without I/O."""
