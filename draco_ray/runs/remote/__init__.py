"""Run directories in object stores.

A run works in a folder of this machine as any other does; beside it, `replica.Replica` copies that folder to the store:

::

    manifests/<epoch>-<number>-<digest>.json   what a copy consists of; the latest one that is whole is the run
    objects/<sha256>                           bytes of files, never changed; small files share one
    claims/<epoch>-<owner>.json                who works on the run, renewed while they do

A manifest is written once everything that it names is there, so the store's copy is always a run as it was at one
moment.
"""
