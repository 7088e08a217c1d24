"""Which worker runs on which node, where the nodes are alike and nobody else decides it."""

from collections.abc import Mapping, Sequence

from areno.errors import UsageError
from areno.launch.launcher import RoleNeed

Placement = dict[str, list[str]]
"""Node of each worker, by role."""


def spread(needs: Mapping[str, RoleNeed], nodes: Sequence[str], gpus_per_node: int) -> Placement:
    """Place the workers of all roles; the first worker of the first role is on the first node.

    Workers with GPUs fill one node after the other; those without go where the fewest cores are taken. Raises UsageError:
    there are not enough GPUs, or a role's ``nodelist`` and ``exclude`` leave no node.
    """
    gpus, cores = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    placed: Placement = {}
    for role, need in sorted(needs.items(), key=lambda entry: bool(entry[1].beside)):
        if need.beside:
            placed[role] = placed[need.beside][: need.workers]
            continue
        allowed = _allowed(role, need, nodes)
        placed[role] = []
        for _ in range(0, need.workers, need.together):
            wanted = need.gpu * need.together
            fitting = [node for node in allowed if gpus[node] + wanted <= gpus_per_node] if wanted else allowed
            if not fitting:
                raise UsageError(
                    f"{len(nodes)} nodes with {gpus_per_node} GPUs each are too few for {need.workers} workers of {role} "
                    f"with {need.gpu} GPUs each beside the others; raise cluster.n_nodes, or give smaller sizes in backend"
                )
            node = fitting[0] if wanted else min(fitting, key=lambda name: cores[name])
            gpus[node] += wanted
            cores[node] += need.cpu * need.together
            placed[role] += [node] * need.together
    return placed


def _allowed(role: str, need: RoleNeed, nodes: Sequence[str]) -> list[str]:
    listed = set(filter(None, (need.nodelist or "").split(",")))
    excluded = set(filter(None, (need.exclude or "").split(",")))
    allowed = [node for node in nodes if node not in excluded and (not listed or node in listed)]
    if not allowed:
        raise UsageError(
            f"{role}.scheduling_spec leaves no node of {', '.join(nodes)}: nodelist={need.nodelist}, exclude={need.exclude}"
        )
    return allowed


def most_on_a_node(needs: Mapping[str, RoleNeed], placed: Placement) -> tuple[int, int]:
    """Cores that the workers of one node take at most, and GPUs."""
    cores, gpus = dict[str, int](), dict[str, int]()
    for role, nodes in placed.items():
        for node in nodes:
            cores[node] = cores.get(node, 0) + needs[role].cpu
            gpus[node] = gpus.get(node, 0) + (0 if needs[role].beside else needs[role].gpu)
    return max(cores.values(), default=1), max(gpus.values(), default=0)
