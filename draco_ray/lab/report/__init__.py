"""A run to look at: one HTML file, and the paper's figures."""
