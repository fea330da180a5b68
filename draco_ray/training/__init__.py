"""The outer loop: which tasks a step trains on, what it reports, and the driver that ties the actors together."""
