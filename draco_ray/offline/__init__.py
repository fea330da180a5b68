"""Stand-ins for what a machine without GPU, key or download lacks: a starter policy and a rule judge."""
