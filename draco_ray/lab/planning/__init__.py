"""What a configuration takes: bytes per GPU and seconds per step, from arithmetic alone (docs/planning.md)."""
