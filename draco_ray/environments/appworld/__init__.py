"""AppWorld behind a jail: its data, its server processes, and one slot to play tasks in."""
