"""The run directory: what a run writes while it goes, and how it reads back."""
