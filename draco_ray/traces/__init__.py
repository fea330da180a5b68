"""Traces of other agents: read from many formats, judged in groups, scored step by step.

========================  ==========================================================================================
`files`                   files to records, also from compressed and packed files
`readers`                 one reader per format: records to conversations
`entry`, `parts`,         one conversation, with messages in any dialect
`messages`
`requests`                the messages, system prompt and tools of a request in any provider's form
`calls`                   conversations reconstructed from single model calls
`conversation`            a conversation as prompt, steps and gaps
`unread`                  fields of a record that no reader looked up
`load`                    `load_traces`: paths in, groups of traces out, without holding them in memory
`trajectory`              a trace as a `Trajectory`, and truncated to what a judge can read
`judging`, `library`      the judge's phases over a group; `judge` and `judge_sync`
`keeping`                 the run directory and ``judged.jsonl``
========================  ==========================================================================================

This package imports no torch, Ray or transformers.
"""
