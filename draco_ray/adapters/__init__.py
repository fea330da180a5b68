"""Step credit for other trainers and evaluators, one small module each; docs/adapters.md shows them.

======================  ================================================================================================
`verdicts`              the store of verdicts, which judging writes and advantage estimators read
`credit`                judges messages or tokens and stores the verdicts
`per_token_advantages`  assigns step advantages to tokens
`conversations`         judges groups of conversations in memory; the other adapters use it
`trl`, `trl_async`      a reward function and per-token advantages for TRL's GRPOTrainer and AsyncGRPOTrainer
`verl`                  a manager of agent loops and an estimator for verl's trainer
`skyrl`                 a trainer class for SkyRL, step-wise trajectories included
`verifiers`             rewards and per-token advantages on the traces of verifiers
`prime_rl`              an algorithm of prime-rl
`openrlhf`              an experience maker for OpenRLHF
`slime`                 two functions for slime, by import path
`tinker`                training data for Tinker's API
`inspect_scorer`        a scorer for Inspect, with verdicts as metadata
`art`                   ART's ``ruler_score_group``, with rubric, verdicts and step advantages
======================  ================================================================================================

Each module imports its framework only when used; no framework is a dependency.
"""
