"""A generated AppWorld world ("sandbox"): AppWorld's own engine and evaluator on data made on the spot.

Data flow of ``python -m draco_ray.sandbox.world build``::

    seed ─► population.World ─► store (AppWorld's models) ─► data/base_dbs
                   │
                   └► families.*.draft ─► Draft ─► tasks.write_task ─► data/tasks/<id>/

``scripts`` holds the families' reference solutions and their faulty variants: the source of demonstrations.
"""
