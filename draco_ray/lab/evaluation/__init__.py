"""Success on benchmarks, measured by their own evaluators, independent of training."""
