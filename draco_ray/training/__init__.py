"""The outer training loop: it chooses the tasks of each step, connects the actors, and reports on the steps."""
