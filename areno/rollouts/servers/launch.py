"""Run a server under a supervisor, which ends it and all that it has started when the trainer ends, whatever ends that.

    python -m areno.rollouts.servers.launch COMMAND...

It dials whoever has started it, and says where the server will listen: on the address of this machine that others reach, on
a free port, which take the places of ``{host}`` and ``{port}`` in the command.
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
    """Fork, and become the command in the child."""
    with suppress(OSError):
        os.setsid()  # Ctrl-C is the trainer's matter
    connection = dial()
    frames = connection.frames()
    host = os.environ.get(NODE_ADDRESS, _LOOPBACK) if connection.far else _LOOPBACK
    port = free_port(host)
    frames.send(f"{host} {port}".encode())
    fork_supervised(connection.socket.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # This program's own packages are not those of a server of another environment.
    own, paths = str(Path(areno.__file__).parents[1]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != own)
    command = [word.replace(HOST, host).replace(PORT, str(port)) for word in sys.argv[1:]]
    os.execvp(command[0], command)


def free_port(host: str) -> int:
    """A port that nobody listens on now; a server that finds it taken ends, and is started again with another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
