"""A stand-in for a container engine with a daemon: ``stand_in_engine.py [-v HOST:INSIDE ...] [--network] [--share-pids]
WORDS...`` runs a command in namespaces, on this host's own file system.

As with Docker, the container is not a descendant of the client, gets none of its environment, and outlives it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

IN_NAMESPACES = """
root=$(mktemp -d)
mount -t tmpfs tmpfs "$root"
for each in usr bin sbin lib lib32 lib64 etc dev tmp; do
    if [ -L "/$each" ]; then ln -s "$(readlink "/$each")" "$root/$each"
    elif [ -d "/$each" ]; then mkdir "$root/$each"; mount --rbind "/$each" "$root/$each"; fi
done
mkdir "$root/proc"; mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do mkdir -p "$root/${1#*:}"; mount --bind "${1%%:*}" "$root/${1#*:}"; shift; done
shift
exec chroot "$root" "$@"
"""
WITH_LOOPBACK = """
import os, sys
sys.path.insert(0, sys.argv[1])
from draco_ray.environments.jail import linux
linux.start_loopback()
os.execvp(sys.argv[2], sys.argv[2:])
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", action="append", default=[])
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--share-pids", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    namespaces = ["--mount", "--ipc", *([] if asked.network else ["--net"])]
    namespaces += [] if asked.share_pids else ["--pid", "--fork"]
    namespaces += [] if os.getuid() == 0 else ["--map-root-user"]
    # The daemon does not end with the client; it writes the exit code to a pipe.
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        up = [] if asked.network else [sys.executable, "-c", WITH_LOOPBACK, str(Path(__file__).parents[2])]
        inside = ["sh", "-c", IN_NAMESPACES, "sh", *asked.v, "--", *asked.words]
        environment = {
            "PATH": os.defpath + ":/usr/sbin:/sbin",
            "IN_IMAGE": "yes",
        }
        ran = subprocess.run(["unshare", *namespaces, *up, *inside], env=environment)
        os.write(tells, bytes([ran.returncode % 256]))
        os._exit(0)
    os.close(tells)
    code = os.read(told, 1)
    return code[0] if code else 125


if __name__ == "__main__":
    sys.exit(main())
