"""The rule judge: it answers the judge's rendered prompts by explicit rules about what a trajectory shows.

It stands in for a frontier judge where there is none. It sees what such a judge would see, the text of one prompt, and
nothing else: no environment, no ground truth, no memory of earlier calls. Its entry point is `answering.answer`.

=============  =========================================================================================================
`reading`      prompt text -> phase, task, runs, criteria; entries -> reply
`demands`      task text -> what must be read, selected by, changed, answered (vocabulary: ``rules.yaml``)
`trace`        the code of a run -> its API calls, and from which of them each value was computed
`case`         a run of a task, with the derived facts that several rules use
`checks`       a case -> a verdict with the steps that decided it, one function per rule
`rules`        the rules, each with a criterion of ``rules.yaml`` and a check; any criterion -> its rule
`phases`       the five phases, for any set of rules
`simple`       a rule judge for an environment of your own
`noise`        a rule judge with known error rates
=============  =========================================================================================================
"""
