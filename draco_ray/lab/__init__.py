"""Tools that read runs and measure policies:
evaluation, analysis, report, planning, rubric authoring. Training never imports them."""
