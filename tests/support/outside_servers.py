"""The servers outside the hosts of `tests.support.hosts`: the judge and an S3 server, both real.

python -m tests.support.outside_servers ADDRESS: prints the judge's and the store's port in a line; ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading

import uvicorn
from moto.server import ThreadedMotoServer

from draco_ray.sandbox.judge_server import JudgeApp, JudgeServerOptions


def main(address: str) -> None:
    """Serve until the standard input ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    store.start()
    listener = socket.create_server((address, 0))
    judge = uvicorn.Server(
        uvicorn.Config(JudgeApp(JudgeServerOptions(latency=0.5)).asgi, log_level="warning", access_log=False)
    )
    threading.Thread(target=judge.run, args=([listener],), daemon=True).start()
    print(json.dumps([listener.getsockname()[1], store.get_host_and_port()[1]]), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
