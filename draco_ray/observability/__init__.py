"""Watching a run: Ray metrics and their Grafana dashboard, experiment trackers, structured logs."""
