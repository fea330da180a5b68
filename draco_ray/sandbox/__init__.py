"""Stand-ins for what a machine without GPU, key or download lacks:
a generated world, a starter policy, a rule judge."""
