"""GRPO on a LoRA adapter."""
