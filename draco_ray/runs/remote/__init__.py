"""Run directories in object stores.

A run works in a local folder as any other does; beside it, `copier.Copier` copies that folder to the store:

::

    manifests/<epoch>-<number>-<digest>.json   the files of one copy; the latest one that is whole is the run
    objects/<sha256>                           contents of files, never changed; small files share one
    claims/<epoch>-<owner>.json                who works on the run, renewed while they do

A manifest is written after everything that it names, so the store's copy is always a run as it was at one moment.
"""
