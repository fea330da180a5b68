"""A generated AppWorld world ("sandbox"): AppWorld's own engine and evaluator on data made on the spot.

Data flow of ``python -m draco_ray.sandbox.world build``::

    seed ─► population.World ─► store (AppWorld's models) ─► data/base_dbs
                   │
                   └► drafts ─► Draft ─► store.write_task ─► data/tasks/<id>/

``families.toml`` has the families' wordings and solutions; ``scripts`` makes reference solutions and faulty variants of
them, the source of demonstrations.
"""
