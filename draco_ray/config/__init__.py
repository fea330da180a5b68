"""The configuration: its schema with every default, the loader of files and overrides, and the presets."""
