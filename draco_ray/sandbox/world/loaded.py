"""AppWorld with everything that a task needs, for a process whose forks share it: importing this module loads it.

The garbage collector stays off. What AppWorld leaves behind with every task makes collections ever longer and frees
nothing, so forks are to end after some tasks.
"""

import gc
import importlib

from draco_ray.environments.appworld.engine import ask_models_by_inheritance

gc.disable()
ask_models_by_inheritance()

from appworld.apps import get_all_apps  # noqa: E402
from appworld.environment import AppWorld  # noqa: E402, F401

for name in get_all_apps():
    importlib.import_module(f"appworld.apps.{name}.apis")
gc.freeze()
