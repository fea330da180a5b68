"""The policy as a code agent: token-in, token-out."""
