"""The rule judge: it answers a judge's prompts by explicit rules about what a trajectory shows.

It replaces a judge model where none is available. Like a judge model it sees only the text of one prompt: no
environment, no ground truth, no memory of earlier calls. Its entry point is `answering.answer`.

=============  =========================================================================================================
`reading`      parses a prompt into phase, task, runs and criteria; formats the reply
`demands`      finds in the task's text the lists, conditions and changes that it asks for (words: ``rules.yaml``)
`trace`        finds in a run's code the API calls, and the calls that each value was computed from
`case`         a run and its task, with the results of `demands` and `trace`
`checks`       one function per rule: from a case to a verdict, with the steps that decided it
`rules`        the rules, each a criterion of ``rules.yaml`` with its check; finds the rule that fits a given criterion
`phases`       answers the prompts of all phases by any set of rules
`simple`       makes a rule judge for an environment of your own
`noise`        a rule judge with known error rates
=============  =========================================================================================================
"""
