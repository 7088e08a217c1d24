"""Runs each task as a separate job step on the nodes of a Slurm job, which :mod:`areno.experiments.slurm_job` submits."""

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from areno.errors import EngineError, UsageError
from areno.launch.launcher import NODE, Names, RemoteLauncher, RoleNeed, RunningTask, Task
from areno.launch.placement import place_workers

_COMMAND_S, _AWAY_S = 60.0, 60.0
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
# Seconds that srun may take to notice the end of its job step.
_NOTICE_S = 10.0
# Variables of the job, by prefix, that would conflict with the options of a step.
_OF_THE_JOB = (
    "SLURM_MEM_",
    "SLURM_CPUS_PER_TASK",
    "SLURM_NTASKS",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
)


class SlurmTask:
    """See :class:`areno.launch.launcher.RunningTask`. ``pid`` is the process id of srun on this machine."""

    def __init__(self, srun: subprocess.Popen[bytes], job: str, step: str, node: str) -> None:
        self.pid, self.node, self.returncode = srun.pid, node, None
        self._srun, self._job, self._step = srun, job, step

    returncode: int | None

    def poll(self) -> int | None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        self.returncode = self._srun.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See :class:`areno.launch.launcher.RunningTask`."""
        self.returncode = self._srun.wait(timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        with suppress(EngineError):  # the job step has ended, or Slurm does not answer
            self._signal(sig)

    def _signal(self, sig: int) -> None:
        steps = run(["squeue", "--steps", "--noheader", f"--jobs={self._job}", "--format=%i|%j"]).splitlines()
        for number, _, name in (line.strip().partition("|") for line in steps):
            if name == self._step:
                run(["scancel", f"--signal={signal.Signals(sig).name.removeprefix('SIG')}", number])

    def kill(self) -> None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        if self.poll() is None:
            threading.Thread(target=self._end, name="areno-slurm", daemon=True).start()

    def _end(self) -> None:
        self.send_signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._srun.wait(_NOTICE_S)
            return
        self._srun.kill()


class SlurmLauncher(RemoteLauncher):
    """See :class:`areno.launch.launcher.Launcher`. This process must belong to a Slurm job.

    Raises UsageError if the nodes of the job have too few resources for the workers.
    """

    def __init__(self, needs: Mapping[str, RoleNeed], names: Names, gpus_per_node: int) -> None:
        self._job = os.environ["SLURM_JOB_ID"]
        nodes = hostnames(os.environ["SLURM_JOB_NODELIST"])
        own = os.environ.get("SLURMD_NODENAME", "")
        # Put the trainer's first worker on the node of this process, so that the two share a file system.
        nodes.sort(key=lambda node: node != own)
        listed = {
            role: replace(need, nodelist=_expanded(need.nodelist), exclude=_expanded(need.exclude))
            for role, need in needs.items()
        }
        self._nodes, self._gpus_per_node = nodes, gpus_per_node
        self._listed, self._placed = listed, place_workers(listed, nodes, gpus_per_node)
        super().__init__(needs, names, address_of(own) if own else _own_address(address_of(nodes[0])))

    def launch(self, task: Task) -> RunningTask:
        """See :class:`RemoteLauncher`."""
        need, node = self.needs[task.role], self._placed[task.role][task.number]
        step = f"{task.role}-{task.number}-{uuid.uuid4().hex[:8]}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_JOB)}
        with open(task.log_file, "ab") if task.log_file else nullcontext() as log:
            srun = subprocess.Popen(
                [*step_command(need, step, node), *need.command(task)],
                env={**inherited, **task.environment, NODE: node},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is handled by this process
            )
        return SlurmTask(srun, self._job, step, node)

    def resize(self, role: str, workers: int) -> None:
        """See :class:`RemoteLauncher`. Raises UsageError if the nodes of the job have too few resources."""
        if workers <= len(self._placed[role]):
            return
        listed = self._listed | {role: replace(self._listed[role], workers=workers)}
        placed = place_workers(listed, self._nodes, self._gpus_per_node)
        if len(placed[role]) < workers:
            raise UsageError(
                f"{workers} workers of {role} are too many, because {role} is colocated with {listed[role].beside}, whose "
                f"workers have room for only {len(placed[role])} workers of {role}; use fewer workers"
            )
        self._placed = placed


def step_command(need: RoleNeed, step: str, node: str) -> list[str]:
    """Return the srun command that starts a worker, without the command of the worker itself."""
    words = ["srun", "--export=ALL", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={step}"]
    words.append(f"--cpus-per-task={need.cpu}")
    if need.memory_gb is not None:
        words.append(f"--mem={need.memory_gb * 1024}")
    if need.beside:
        words.append("--overlap")
    else:
        words.append("--exact")
    if need.gpu:
        words.append(f"--gres=gpu:{need.gpu}")
    return [*words, *shlex.split(os.path.expandvars(need.srun_additional_args))]


def hostnames(nodelist: str) -> list[str]:
    """Return the names of the nodes in a node list, such as ``n[1-4]``."""
    return run(["scontrol", "show", "hostnames", nodelist]).split()


def _expanded(nodelist: str | None) -> str | None:
    return ",".join(hostnames(nodelist)) if nodelist else None


def _own_address(other: str) -> str:
    """Return the address of this machine on the route to another machine, without sending a packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def address_of(node: str) -> str:
    """Return the IP address of a node. Raises EngineError if the node's name in Slurm cannot be resolved."""
    name = _fields(run(["scontrol", "show", "node", node])).get("NodeAddr", node)
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise EngineError(
            f"scheduler.type=slurm: the address {name} of node {node} cannot be resolved on this machine ({error}); correct "
            "NodeAddr in slurm.conf, or the machine's DNS or /etc/hosts"
        ) from error


def size() -> tuple[int, int]:
    """Return the numbers of nodes and cores of the current Slurm job. Raises UsageError outside a job."""
    if not in_job():
        raise UsageError(
            "scheduler.type=slurm: this process is not in a Slurm job; submit the experiment with 'areno run FILE.yaml', or "
            "start your program in a job (sbatch, salloc)"
        )
    cores = 0
    for part in os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1").split(","):
        each, _, times = part.partition("(x")
        cores += int(each) * int(times.rstrip(")") or 1)
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), cores


def exit_code_of(job: str) -> int | None:
    """Return the exit code of a job; None if the job is pending or running.

    If a signal killed the job, the exit code is 128 plus the number of the signal. The function retries for a minute,
    because a restarted Slurm controller may not know the job yet.

    Raises:
        EngineError: the Slurm controller does not respond, or does not know the job.
    """
    deadline = time.monotonic() + _AWAY_S
    while True:
        try:
            shown = run(["scontrol", "show", "job", job, "--oneliner"])
            break
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
    fields = _fields(shown)
    if fields["JobState"] not in _ENDED:
        return None
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    if int(number):
        return 128 + int(number)
    return int(code) or int(fields["JobState"] != "COMPLETED")


def _fields(shown: str) -> dict[str, str]:
    """Parse the ``Name=value`` fields in the output of ``scontrol show``."""
    return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)


def in_job() -> bool:
    """Whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def run(command: Sequence[str]) -> str:
    """Return the output of a command.

    Raises:
        UsageError: the command is not installed.
        EngineError: the command failed or timed out.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except FileNotFoundError as error:
        raise UsageError(
            f"scheduler.type=slurm: {command[0]} is not installed; start areno on a machine of the Slurm cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{' '.join(command)} timed out after {_COMMAND_S:g} s; check whether slurmctld is running"
        ) from error
    if done.returncode:
        raise EngineError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
