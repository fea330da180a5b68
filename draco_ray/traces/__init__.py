"""Traces of other agents: read from many formats, judged in groups, scored step by step.

========================  ==========================================================================================
`files`                   files to records, also from compressed and packed files
`readers`                 one reader per format: records to conversations
`entry`, `parts`,         one conversation, with messages in any dialect
`messages`
`model_request`           the messages, system prompt and tools of a request in any provider's form
`calls`                   conversations reconstructed from single model calls
`conversation`            a conversation as prompt, steps and gaps
`field_tracking`          fields of a record that no reader looked up
`load`                    `load_traces`: paths in, groups of traces out, without holding them in memory
`judging`, `library`      traces as trajectories, and the judge's phases over a group; `judge` and `judge_sync`
`judging_run`             the run directory and ``judged.jsonl``
========================  ==========================================================================================

This package imports no torch, Ray or transformers.
"""
