"""Environment + agent + engine -> trajectory: the agent loop, its worker, and the pool that plays rollouts."""
