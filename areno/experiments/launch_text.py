"""Describes what an experiment would start on a cluster."""

from collections.abc import Sequence

from areno.config.experiment.loader import experiment_class, load_expr_config, settled
from areno.errors import UsageError
from areno.experiments.cluster import needs_of
from areno.experiments.slurm_job import batch_script, driver_command


def launch_text(words: Sequence[str]) -> str:
    """Return the script of the Slurm job, or a description of the workers on the Ray cluster.

    Raises:
        UsageError: no cluster is configured.
    """
    config, _ = load_expr_config(list(words), experiment_class(list(words)))
    config = settled(config)
    kind = config.scheduler.type
    if kind == "slurm":
        return batch_script(config, driver_command(words))
    if kind != "ray":
        raise UsageError(
            "scheduler.type=local starts no job on a cluster, so there is nothing to show; set scheduler.type to ray or slurm"
        )
    lines = []
    for role, need in needs_of(config, gpus=config.cluster.n_gpus_per_node != 0).items():
        where = (
            f" colocated with {need.beside}"
            if need.beside
            else f" (ray_placement_strategy={need.ray_placement_strategy})"
        )
        memory = f", {need.memory_gb} GB of memory" if need.memory_gb else ""
        lines.append(f"{role}: {need.workers} workers{where}, each with {need.cpu} CPUs, {need.gpu} GPUs{memory}\n")
    if config.cluster.n_gpus_per_node is None:
        lines.append(
            "these numbers assume GPUs; on nodes without GPUs, each rank gets scheduling_spec.cpu CPUs, by default 1\n"
        )
    return "".join(lines)
