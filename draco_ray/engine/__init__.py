"""Policy engines, which sample tokens after a token prefix; and the tokenization of chat templates."""
