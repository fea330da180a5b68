"""What confines a process that runs model-written code: namespaces, Landlock, seccomp, limits."""
