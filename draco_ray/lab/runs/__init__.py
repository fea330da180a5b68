"""A run on one screen: what it did, what it cost, what was saved, and when."""
