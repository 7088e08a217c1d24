"""Run a command under a supervisor, which ends it and all that it has started when the trainer ends, whatever ends that.

    python -m areno.rollouts.servers.launch LIFELINE COMMAND...

LIFELINE is the number of an inherited socket whose other end the trainer holds.
"""

import os
import signal
import sys

from areno.rewards.supervisor import fork_supervised


def main() -> None:
    """Fork, and become the command in the child."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    fork_supervised(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's matter
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
