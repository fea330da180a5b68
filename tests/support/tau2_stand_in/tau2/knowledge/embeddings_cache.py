"""Stand-in for tau2.knowledge.embeddings_cache."""

from __future__ import annotations

from pathlib import Path

_global_cache = None


class EmbeddingsCache:
    """Stores its folder."""

    def __init__(self, cache_dir: str) -> None:
        self.cache_dir = Path(cache_dir)
        self.cache_dir.mkdir(parents=True, exist_ok=True)
