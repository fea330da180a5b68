"""vLLM's OpenAI server with its engine core forked, which on a CPU halves its start; run by ``python -m`` as vLLM's."""

from __future__ import annotations

from draco_ray.engine.forked_core import forked_core
from draco_ray.extras import uncollected


def main() -> None:
    """Serve as the command line says."""
    with uncollected():
        from vllm.entrypoints.launchers.api_server import entry

    with forked_core():
        entry.main()


if __name__ == "__main__":
    main()
