"""The sandbox's rule judge: a prompt in, its phase and the reply out."""

from draco_ray.sandbox.rule_judge.phases import RuleJudge
from draco_ray.sandbox.rule_judge.rules import RULES, find_rule

answer = RuleJudge(RULES, find_rule)
