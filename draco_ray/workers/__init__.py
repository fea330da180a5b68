"""A pool of workers of one kind: its size, which worker takes a call, and what happens to the calls of a lost one."""
