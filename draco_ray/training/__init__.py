"""The outer loop: the choice of each step's tasks, its reports, and the driver that connects the actors."""
