"""Attribution quality: does a judge find a planted fault, and does credit assign blame to the step with the fault?

=========  ============================================================================================================
`plant`    reference solutions of the sandbox with planted faults, executed in AppWorld, kept if the tests confirm them
`rubric`   a criterion for each kind of fault, so that the right verdicts are known
`bench`    a judge's verdicts, citations and step advantages on them
`measure`  measures of these results, with intervals and baselines
`step_labels` judges' step labels against people's, and the reliability of each judge
=========  ============================================================================================================
"""
