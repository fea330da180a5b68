"""Traces that somebody else's agent left: read from any of several formats, judged in groups, scored step by step.

========================  ==========================================================================================
`messages`                one conversation, in whatever dialect its messages are written
`conversation`            a conversation as prompt, steps and gaps
`formats`                 files and records: which format is it, and where in it are the traces
`load`                    `load_traces`: paths in, groups of traces out, without holding them in memory
`trajectory`              a trace as a `Trajectory`, and cut to what a judge can read
`judging`, `library`      the judge's phases over a group; `judge` and `judge_sync`
`keeping`                 the run directory and ``judged.jsonl``
========================  ==========================================================================================

No torch, Ray or transformers in here.
"""
