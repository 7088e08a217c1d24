"""Runs tasks on a Ray cluster. For each task, a Ray actor starts a process on the node where Ray has placed the actor.

Each role that is not colocated has its own placement groups. The task runs in a separate process, so the threads and the
pickling of Ray do not affect the task, and the actor can kill a hanging task. A task exits when its connection is closed.

The output of a task is written to Ray's logs. If the folder of the task's log file exists on the node, the output is also
written to this file.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.errors import EngineError, UsageError, first_line
from areno.launch.launcher import NODE, Names, RemoteLauncher, RoleNeed, RunningTask, Task
from areno.launch.placement import divided_places

logger = logging.getLogger(__name__)

_PLACE_S = 60.0
_PLACE_AGAIN_S = 15.0  # short, so that a lost node is reported within a minute, after all restarts of its tasks
_CALL_S, _REST_S, _POLL_S = 30.0, 5.0, 0.1
_GIB = 1 << 30


class TaskHost:
    """The Ray actor that starts a task."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, need: RoleNeed, task: Task, environment: Mapping[str, str]) -> int:
        """Start the task with additional environment variables, and return the process id of the task."""
        self._process = subprocess.Popen(
            need.command(task),
            env={**os.environ, "RAY_ADDRESS": _address(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy, args=[self._process, task.log_file], daemon=True)
        self._copier.start()
        return self._process.pid

    def wait(self) -> int:
        """Wait until the task exits, and return the exit code of the task."""
        assert self._process is not None
        code = self._process.wait()
        self._copier.join(_REST_S)  # the last output of the task
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal to the task. SIGKILL also kills the child processes of the task."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            if sig == signal.SIGKILL:
                os.killpg(self._process.pid, sig)
            else:
                self._process.send_signal(sig)

    def node(self) -> str:
        """Return the address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def devices(self) -> str:
        """Return ``CUDA_VISIBLE_DEVICES`` of the actor's process."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @staticmethod
    def _copy(process: subprocess.Popen[bytes], log_file: Path | None) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            if log_file is not None and log_file.parent.is_dir():
                with open(log_file, "ab") as log:
                    log.write(line)


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


class RayTask:
    """See :class:`areno.launch.launcher.RunningTask`."""

    def __init__(self, ray: Any, actor: Any, name: str, pid: int, node: str) -> None:
        self.pid, self.node, self.returncode = pid, node, None
        self.actor, self._ray, self._name = actor, ray, name
        self._end = actor.wait.remote()

    returncode: int | None

    def poll(self) -> int | None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See :class:`areno.launch.launcher.RunningTask`. The exit code is -9 if the actor or the node of the task died."""
        if self.returncode is None:
            try:
                self.returncode = int(self._ray.get(self._end, timeout=timeout))
            except self._ray.exceptions.GetTimeoutError as error:
                raise subprocess.TimeoutExpired(self._name, timeout or 0.0) from error
            except self._ray.exceptions.RayError as error:
                logger.warning("the Ray actor of %s on %s died: %s", self._name, self.node, first_line(error))
                self.returncode = -signal.SIGKILL
            with suppress(Exception):
                self._ray.kill(self.actor)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        if self.returncode is None:
            with suppress(self._ray.exceptions.RayError):
                self.actor.send_signal.remote(sig)

    def kill(self) -> None:
        """See :class:`areno.launch.launcher.RunningTask`."""
        self.send_signal(signal.SIGKILL)


class RayLauncher(RemoteLauncher):
    """See :class:`areno.launch.launcher.Launcher`. This process must be connected to Ray. Container images are ignored.

    Raises UsageError if the cluster has too few resources for the roles.
    """

    def __init__(self, needs: Mapping[str, RoleNeed], names: Names) -> None:
        import ray

        self._ray: Any = ray
        needs = {role: replace(need, image="") for role, need in needs.items()}
        super().__init__(needs, names, ray.util.get_node_ip_address())
        self._groups: dict[str, list[Any]] = {}  # placement groups of each role
        self._further: dict[str, list[Any]] = {}  # added by `resize`
        self._tasks: dict[str, RayTask] = {}  # the newest task of each name
        self._lock = threading.Lock()
        refuse_impossible(self.needs, nodes())

    def launch(self, task: Task) -> RunningTask:
        """See :class:`RemoteLauncher`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, need = self._ray, self.needs[task.role]
        holder = need.beside or task.role
        own, span = not need.beside, need.span(self.needs[holder])
        group, bundle = self._place(holder, task.number if own else task.number * span)
        strategy = PlacementGroupSchedulingStrategy(group, bundle)
        actor_cls: Any = ray.remote(TaskHost)
        # Colocated actors share the cores of a bundle; its GPUs are assigned to the role that reserved the bundle.
        actor = actor_cls.options(
            num_cpus=need.cpu, num_gpus=need.gpu if own else 0, scheduling_strategy=strategy, max_concurrency=4
        ).remote()
        environment = dict(task.environment)
        if not own and need.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices(task.role, need, task.number * span, span)
        node = self._node_of(actor, _PLACE_AGAIN_S if task.name in self._tasks else _PLACE_S)
        try:
            pid = ray.get(actor.start.remote(need, task, {**environment, NODE: node}), timeout=_CALL_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            ray.kill(actor)
            raise EngineError(f"Ray could not start {task.name}: {first_line(error)}") from error
        self._tasks[task.name] = started = RayTask(ray, actor, task.name, pid, node)
        return started

    def resize(self, role: str, workers: int) -> None:
        """See :class:`areno.launch.launcher.Launcher`. Each added engine (a group of workers) gets its own placement group."""
        need = self.needs[role]
        if need.beside and workers > need.workers:
            raise UsageError(
                f"{workers} workers of {role} are too many, because {role} is colocated with {need.beside}, whose workers have "
                f"room for only {need.workers} workers of {role}; use fewer workers"
            )
        with self._lock:
            groups = self._further.setdefault(role, [])
        sets = max(workers - need.workers, 0) // need.together
        if missing := max(sets - len(groups), 0):
            more = replace(need, workers=missing * need.together, ray_placement_strategy="separate")
            groups += self._reserve(role, more, need.workers + len(groups) * need.together)
        self._remove(groups[sets:])
        del groups[sets:]

    def close(self) -> None:
        """See :class:`areno.launch.launcher.Launcher`."""
        super().close()
        with self._lock:
            all_groups = [*self._groups.values(), *self._further.values()]
            self._groups, self._further = {}, {}
        self._remove([group for groups in all_groups for group in groups])

    def _remove(self, groups: Sequence[Any]) -> None:
        for group in groups:
            with suppress(Exception):
                self._ray.util.remove_placement_group(group)

    def _devices(self, role: str, need: RoleNeed, first: int, count: int) -> str:
        """Return the ids of the GPUs that a colocated worker uses.

        The colocated worker shares GPUs with ``count`` workers of the role ``need.beside``, starting with worker number
        ``first``. The GPUs of these workers, in the order of the worker numbers, form one list. The colocated worker uses
        the first ``need.gpu`` GPUs of this list.
        """
        holders = [self._tasks[f"{need.beside}/{number}"] for number in range(first, first + count)]
        if len({task.node for task in holders}) > 1:
            raise UsageError(divided_places(role, need, [task.node for task in holders]))
        try:
            devices = self._ray.get([task.actor.devices.remote() for task in holders], timeout=_CALL_S)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            raise EngineError(f"the workers of {need.beside} did not report their GPUs: {first_line(error)}") from error
        return ",".join(",".join(devices).split(",")[: need.gpu])

    def _node_of(self, actor: Any, timeout_s: float) -> str:
        ray = self._ray
        try:
            node: str = ray.get(actor.node.remote(), timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            ray.kill(actor)
            raise EngineError(f"Ray did not start an actor within {timeout_s:g} s: {first_line(error)}") from error
        return node

    def _place(self, role: str, number: int) -> tuple[Any, int]:
        """Return the placement group of a worker, and the index of the worker's bundle in the group."""
        need = self.needs[role]
        with self._lock:
            if role not in self._groups:
                self._groups[role] = self._reserve(role, need)
            groups, further = self._groups[role], self._further.get(role, [])
        if number >= need.workers:
            return further[(number - need.workers) // need.together], number % need.together
        if len(groups) == 1:
            return groups[0], number
        return groups[number // need.together], number % need.together

    def _reserve(self, role: str, need: RoleNeed, first: int = 0) -> list[Any]:
        """Create placement groups for worker number ``first`` and all workers after it.

        With ``ray_placement_strategy=shared``, engines with a single worker share one group. In all other cases, each engine
        gets its own group.
        """
        guests = [other for other in self.needs.values() if other.beside == role]
        bundle: dict[str, float] = {"CPU": need.cpu + sum(guest.cpu for guest in guests)}
        if need.gpu:
            bundle["GPU"] = need.gpu
        if need.memory_gb is not None:
            bundle["memory"] = need.memory_gb * _GIB
        bundles = [dict(bundle) for _ in range(need.workers)]
        for index, node in enumerate(_listed(need.nodelist, first, need.workers, need.together)):
            bundles[index][f"node:{node}"] = 0.001
        one = need.ray_placement_strategy == "shared" and need.together == 1
        size = need.workers if one else need.together
        parts = [bundles[at : at + size] for at in range(0, need.workers, size)]
        strategy = "STRICT_PACK" if need.together > 1 else "PACK"
        groups = [self._ray.util.placement_group(part, strategy=strategy) for part in parts]
        deadline = time.monotonic() + _PLACE_S
        # Poll, because Ray's own wait blocks all threads of this process.
        while any(self._ray.util.placement_group_table(group)["state"] != "CREATED" for group in groups):
            time.sleep(_POLL_S)
            if time.monotonic() > deadline:
                self._remove(groups)
                raise EngineError(
                    f"Ray has not found room for the workers of {role} ({need.workers} x {_text(bundle)}) within "
                    f"{_PLACE_S:g} s. The whole cluster has these free resources: "
                    f"{_text(self._ray.available_resources())}. Stop other Ray jobs, add nodes, or request less for this role"
                )
        return groups


def refuse_impossible(needs: Mapping[str, RoleNeed], nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Raise UsageError if the cluster is too small for all roles together, or if a worker fits on no node.

    Without this check, Ray would wait forever.
    """
    for role, need in needs.items():
        if need.beside:
            continue
        guests = sum(guest.cpu for guest in needs.values() if guest.beside == role)
        memory = float((need.memory_gb or 0) * _GIB)
        one = {"CPU": float(need.cpu + guests), "GPU": float(need.gpu), "memory": memory}
        if not any(all(node.get(name, 0.0) >= amount for name, amount in one.items()) for node in nodes.values()):
            raise UsageError(
                f"scheduler.type=ray: no node of the cluster has {_text(one)}, which a worker of {role} needs (nodes: "
                f"{_listing(nodes)}); lower the resources in {role}.scheduling_spec"
            )
    for name in ("CPU", "GPU"):
        own = [need for need in needs.values() if name == "CPU" or not need.beside]
        needed = sum(need.workers * (need.cpu if name == "CPU" else need.gpu) for need in own)
        available = sum(node.get(name, 0.0) for node in nodes.values())
        if needed > available:
            raise UsageError(
                f"scheduler.type=ray: the roles together need {needed} {name}s, but the cluster has {available:g} "
                f"({_listing(nodes)}); use smaller parallel sizes in backend, request less in scheduling_spec, or "
                "add nodes"
            )


def nodes() -> dict[str, dict[str, float]]:
    """Return the resources of each live node of the cluster, by the node's address and port.

    The address alone is not unique, because several nodes may run on one machine.
    """
    import ray

    return {
        f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}": dict(node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    }


def _listing(nodes: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(f"{name} with {_text(resources)}" for name, resources in nodes.items()) or "no nodes"


def _text(resources: Mapping[str, float]) -> str:
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    memory = [f"{math.floor(resources['memory'] / _GIB)} GB of memory"] if resources.get("memory") else []
    return ", ".join([*named, *memory]) or "nothing"


def _listed(nodelist: str | None, first: int, workers: int, together: int) -> Sequence[str]:
    """Return the node of each worker from number ``first`` to number ``first + workers - 1``.

    Each engine consists of ``together`` consecutive workers. The first engine gets the first node in ``nodelist``, the second
    engine gets the second node, and so on. After the last node, the assignment continues with the first node. If ``nodelist``
    is empty, the result is empty.
    """
    listed = [name for name in (nodelist or "").split(",") if name]
    return [listed[worker // together % len(listed)] for worker in range(first, first + workers)] if listed else []
