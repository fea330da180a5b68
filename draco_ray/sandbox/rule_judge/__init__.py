"""The rule judge: it answers the judge's rendered prompts by explicit rules about what a trajectory shows.

It stands in for a frontier judge where there is none. It sees what such a judge would see, the text of one prompt, and
nothing else: no environment, no ground truth, no memory of earlier calls. What it does know is what the documentation
of AppWorld's APIs says (`vocabulary`) and how English asks for things (`demands`).

=============  =========================================================================================================
`reading`      prompt text -> phase, task, runs, criteria
`demands`      task text -> what must be read, selected by, changed, answered
`vocabulary`   the words behind that: lists and the APIs that return them, actions, comparisons, fields
`tracing`      the code of a run -> a trace: its API calls, and what each result was computed from (`traces`)
`case`         a run under a task: what several rules want to know of it
`data_rules`, `result_rules`, `conduct_rules`
               a case -> a verdict with the steps that decided it, one function a rule
`catalogue`    every rule, with the criterion that states it
`matching`     anybody's criterion -> the rule that decides it
`pairing`      two lists of criteria -> which of them are the same check
`answering`    the five phases
=============  =========================================================================================================
"""
