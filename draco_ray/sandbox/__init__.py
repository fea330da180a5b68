"""Stand-ins for machines without a GPU, an API key or downloads:
a generated world, a starter policy, a rule judge."""
