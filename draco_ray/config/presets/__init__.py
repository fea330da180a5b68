"""Configuration files of this package: one per machine or model, and in ``settings/`` one per setting."""
