"""What an experiment would start on a cluster, as text."""

from collections.abc import Sequence

from areno.config.experiment.loader import experiment_class, load_expr_config, settled
from areno.errors import UsageError
from areno.experiments.cluster import needs_of
from areno.experiments.submit import batch_script, driver_command


def launch_text(words: Sequence[str]) -> str:
    """The script of a Slurm job, or what is reserved on a Ray cluster. Raises UsageError: the experiment needs no cluster."""
    config, _ = load_expr_config(list(words), experiment_class(list(words)))
    config = settled(config)
    kind = config.scheduler.type
    if kind == "slurm":
        return batch_script(config, driver_command(words))
    if kind != "ray":
        raise UsageError(
            "scheduler.type is local: areno run starts its processes on this machine; set it to ray or slurm"
        )
    lines = []
    for role, need in needs_of(config, gpus=config.cluster.n_gpus_per_node != 0).items():
        where = f" beside those of {need.beside}" if need.beside else f" ({need.ray_placement_strategy})"
        memory = f", {need.mem} GB" if need.mem else ""
        lines.append(f"{role}: {need.workers} workers{where}, each with {need.cpu} CPUs, {need.gpu} GPUs{memory}\n")
    if config.cluster.n_gpus_per_node is None:
        lines.append("where the nodes have no GPUs: each with 1 CPU and none, unless scheduling_spec says more\n")
    return "".join(lines)
