"""To come."""

FAMILIES = ()
