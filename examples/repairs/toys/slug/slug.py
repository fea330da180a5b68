def slug(title):
    """The title in lower case, its words joined by hyphens."""
    return "_".join(title.lower().split())
