"""What reads runs and measures policies:
evaluation, analysis, report, planning, rubric authoring. Training never imports it."""
