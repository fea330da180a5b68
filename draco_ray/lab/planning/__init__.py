"""Resources that a configuration needs: bytes per GPU and seconds per step, by arithmetic (docs/planning.md)."""
