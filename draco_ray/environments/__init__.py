"""Worlds that the policy acts in."""
