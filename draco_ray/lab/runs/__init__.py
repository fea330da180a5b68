"""Commands that read one run: summary, judge cost, timeline and Inspect logs."""
