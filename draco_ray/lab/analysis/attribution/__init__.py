"""Attribution quality: does a judge find the fault that was planted, and does credit push the step that holds it?

=========  ============================================================================================================
`plant`    reference solutions of the sandbox with planted faults, executed in AppWorld, kept if the tests confirm them
`rubric`   a criterion for each kind of fault, so that the right verdicts are known
`bench`    a judge's verdicts, citations and step advantages on them
`measure`  what is measured of that, with intervals and baselines
`step_labels` judges' labels of steps against people's, and the reliability of each judge
=========  ============================================================================================================
"""
