"""The configuration: its schema with every default, how a file and overrides become one, and the presets."""
