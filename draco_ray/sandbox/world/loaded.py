"""AppWorld with everything that a task needs, loaded on import: a fork server preloads it, and its forks share it.

The garbage collector is off: AppWorld leaves objects behind with every task, so collections would take ever longer and
free nothing. A fork should therefore end after some tasks.
"""

import gc
import importlib

gc.disable()

from appworld.apps import get_all_apps  # noqa: E402
from appworld.environment import AppWorld  # noqa: E402, F401

for name in get_all_apps():
    importlib.import_module(f"appworld.apps.{name}.apis")
gc.freeze()
