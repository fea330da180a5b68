"""Success on benchmarks, measured by their own evaluators after or beside training, never as part of it."""
