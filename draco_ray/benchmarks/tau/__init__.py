"""τ-bench banking: tau2-bench in its own environment, the policy behind vLLM's server, results as in the paper."""
