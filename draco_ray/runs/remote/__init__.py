"""Run directories in object stores.

The run works in a local folder as usual; meanwhile, `copier.Copier` copies that folder to the store:

::

    manifests/<epoch>-<number>-<digest>.json   the files of one copy; the latest complete manifest is the run
    objects/<sha256>                           contents of files, never changed; small files share an object
    claims/<epoch>-<owner>.json                which driver works on the run, renewed while it does

A manifest is written after every object that it names, so the store's copy is always a run as it was at one moment.
"""
