"""An endpoint of the policy, compatible with OpenAI and Anthropic, for agents with their own loop."""
