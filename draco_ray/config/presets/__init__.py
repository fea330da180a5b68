"""Configuration files that ship with the package: one a machine or model, and one a setting in ``settings/``."""
