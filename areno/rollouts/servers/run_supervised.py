"""Runs a server under a supervisor. When the trainer exits, the supervisor kills the server and its child processes.

    python -m areno.rollouts.servers.run_supervised COMMAND...

This program sends the address of its machine and a free port to the process that launched it. Before the program runs COMMAND,
it replaces ``{host}`` and ``{port}`` in COMMAND with this address and port.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import areno
from areno.launch.links import NODE_ADDRESS, dial
from areno.rewards.supervisor import fork_supervised

HOST, PORT = "{host}", "{port}"
_LOOPBACK = "127.0.0.1"


def main() -> None:
    """Fork, and run the server's command in the child process."""
    with suppress(OSError):
        os.setsid()  # only the trainer handles Ctrl-C
    connection = dial()
    frames = connection.frames()
    host = os.environ.get(NODE_ADDRESS, _LOOPBACK) if connection.far else _LOOPBACK
    port = free_port(host)
    frames.send(f"{host} {port}".encode())
    fork_supervised(connection.socket.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A server in another environment must not import the packages of this one.
    root, paths = str(Path(areno.__file__).parents[1]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != root)
    command = [word.replace(HOST, host).replace(PORT, str(port)) for word in sys.argv[1:]]
    os.execvp(command[0], command)


def free_port(host: str) -> int:
    """Return a free port. If another program takes the port before the server does, the server fails to start."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
