"""Assigns workers to the nodes of a cluster. All nodes must have the same number of GPUs."""

from collections.abc import Mapping, Sequence

from areno.errors import UsageError
from areno.launch.launcher import RoleNeed

Placement = dict[str, list[str]]
"""The nodes of the workers of each role, in the order of the workers."""


def place_workers(needs: Mapping[str, RoleNeed], nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Choose a node for each worker of each role.

    The first worker of the first role is placed on the first node that this role allows. Workers with GPUs fill one node after
    another. A worker without GPUs is placed on the node with the fewest cores in use.

    Raises:
        UsageError: there are too few GPUs, the GPUs of a colocated worker would be on several nodes, or ``nodelist`` and
            ``exclude`` allow no node.
    """
    gpus, cores = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    placed: Placement = {}
    for role, need in sorted(needs.items(), key=lambda entry: bool(entry[1].beside)):
        if need.beside:
            placed[role] = _beside(role, need, need.span(needs[need.beside]), placed[need.beside])
            continue
        allowed = _allowed(role, need, nodes)
        placed[role] = []
        gpus_needed = need.gpu * need.together
        if gpus_needed > gpus_per_node:
            raise UsageError(
                f"an engine of {role} needs {gpus_needed} GPUs on a single node, but a node has {gpus_per_node}; use smaller "
                f"parallel sizes in {role}.backend, or correct cluster.n_gpus_per_node"
            )
        for _ in range(0, need.workers, need.together):
            fitting = (
                [node for node in allowed if gpus[node] + gpus_needed <= gpus_per_node] if gpus_needed else allowed
            )
            if not fitting:
                raise UsageError(
                    f"{need.workers} workers of {role} need {need.gpu} GPUs each, but too few GPUs are free on "
                    f"{len(nodes)} nodes with {gpus_per_node} GPUs each; raise cluster.n_nodes, or use smaller parallel "
                    f"sizes in {role}.backend"
                )
            node = fitting[0] if gpus_needed else min(fitting, key=lambda name: cores[name])
            gpus[node] += gpus_needed
            cores[node] += need.cpu * need.together
            placed[role] += [node] * need.together
    return placed


def _beside(role: str, need: RoleNeed, span: int, holders: Sequence[str]) -> list[str]:
    """Return the node of each colocated worker. Each such worker shares the cores and GPUs of ``span`` workers of another role.

    ``holders`` contains the nodes of all workers of the other role, in the order of these workers.
    """
    shared = [holders[at : at + span] for at in range(0, len(holders) - span + 1, span)][: need.workers]
    if divided := next((nodes for nodes in shared if len(set(nodes)) > 1), None):
        raise UsageError(divided_places(role, need, divided))
    return [nodes[0] for nodes in shared]


def divided_places(role: str, need: RoleNeed, nodes: Sequence[str]) -> str:
    """Return the error message for a colocated worker whose GPUs would be on several nodes."""
    return (
        f"a worker of {role} needs {need.gpu} GPUs on one node, but the GPUs that it shares with {need.beside} are on several "
        f"nodes ({', '.join(nodes)}); use smaller parallel sizes in {role}.backend, or change "
        f"{need.beside}.backend so that {need.beside} uses all GPUs of each node"
    )


def _allowed(role: str, need: RoleNeed, nodes: Sequence[str]) -> list[str]:
    listed = set(filter(None, (need.nodelist or "").split(",")))
    excluded = set(filter(None, (need.exclude or "").split(",")))
    allowed = [node for node in nodes if node not in excluded and (not listed or node in listed)]
    if not allowed:
        raise UsageError(
            f"{role}.scheduling_spec allows none of the nodes {', '.join(nodes)}; correct nodelist={need.nodelist} or "
            f"exclude={need.exclude}"
        )
    return allowed


def most_on_a_node(needs: Mapping[str, RoleNeed], placed: Placement) -> tuple[int, int, int]:
    """Sum the workers' cores, GPUs and GB of memory on each node, and return the three maxima over the nodes.

    The maxima may be on different nodes.
    """
    cores, gpus, memory = dict[str, int](), dict[str, int](), dict[str, int]()
    for role, nodes in placed.items():
        for node in nodes:
            cores[node] = cores.get(node, 0) + needs[role].cpu
            gpus[node] = gpus.get(node, 0) + (0 if needs[role].beside else needs[role].gpu)
            memory[node] = memory.get(node, 0) + (needs[role].memory_gb or 0)
    return max(cores.values(), default=1), max(gpus.values(), default=0), max(memory.values(), default=0)
