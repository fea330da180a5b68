"""An OpenAI-compatible endpoint of the policy, for agents with their own loop; each episode has a URL and a key."""
