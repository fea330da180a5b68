"""Traces of other agents: read from many formats, judged in groups, scored step by step.

========================  ==========================================================================================
`files`                   files to records, whatever they are packed in
`readers`                 one reader per format: records to conversations
`entry`, `parts`,         one conversation, in whatever dialect its messages are written
`messages`
`calls`                   conversations put together from single calls of a model
`conversation`            a conversation as prompt, steps and gaps
`unread`                  what of a record no reader looked at
`load`                    `load_traces`: paths in, groups of traces out, without holding them in memory
`trajectory`              a trace as a `Trajectory`, and truncated to what a judge can read
`judging`, `library`      the judge's phases over a group; `judge` and `judge_sync`
`keeping`                 the run directory and ``judged.jsonl``
========================  ==========================================================================================

No torch, Ray or transformers in here.
"""
