"""A small stand-in for tau2-bench 1.0.1, for tests only: the parts our runner touches, with scripted episodes."""
