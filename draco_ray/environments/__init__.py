"""Worlds the policy acts in."""
