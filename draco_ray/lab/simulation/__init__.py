"""Discrete-event simulation of a recorded run's steps at other sizes: `draco plan --simulate`."""
