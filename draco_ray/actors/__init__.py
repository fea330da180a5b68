"""The Ray shells: each builds a plain class and forwards to it. No thought lives here."""
