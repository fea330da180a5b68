"""Policy engines: what turns a token prefix into sampled tokens; the chat template in tokens."""
