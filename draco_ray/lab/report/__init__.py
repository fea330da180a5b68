"""Reports of a run: one HTML file, and the paper's figures."""
