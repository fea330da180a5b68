"""Authoring a static rubric before training (appendix "Rubric Construction").

Rollouts of the untrained policy -> proposals per task -> one set -> measured on every rollout -> pruned -> a YAML file
that `algorithm.static_rubric` reads.
"""
