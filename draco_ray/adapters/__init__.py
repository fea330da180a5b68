"""Step credit for other trainers and evaluators, one small module each; docs/adapters.md shows them.

==================  ================================================================================================
`tokens`            step advantages to tokens: the matrix that verl and SkyRL take
`conversations`     conversations in memory to judged groups: what the others stand on
`trl`               a reward function and per-token advantages for TRL's GRPOTrainer
`verifiers`         rewards and per-token advantages on the traces of verifiers
`inspect_scorer`    a scorer for Inspect, with verdicts as metadata
`art`               ART's ``ruler_score_group``, with rubric, verdicts and step advantages
==================  ================================================================================================

Each imports its framework only when it is used; none of them is a dependency.
"""
