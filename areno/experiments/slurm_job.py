"""Submits an experiment to Slurm as one job. In the job, ``areno run`` starts each worker as a job step."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.experiments.cluster import needs_of
from areno.experiments.folders import ExperimentFolders
from areno.launch import slurm_steps
from areno.launch.placement import most_on_a_node, place_workers
from areno.python_process import python_command

SCRIPT, OUTPUT = "slurm.sh", "slurm.out"
# SIGTERM is sent this many seconds before the time limit, to leave time for a step and a checkpoint.
_WARNING_S = 120
_POLL_S = 1.0


def batch_script(config: BaseExperimentConfig, command: Sequence[str]) -> str:
    """Return the job script, which runs ``command`` on the first node."""
    cluster, folder = config.cluster, ExperimentFolders.of(config).logs
    nodes = [f"node {number}" for number in range(cluster.n_nodes)]  # the actual names are known only inside the job
    gpus = cluster.n_gpus_per_node or 0
    needs = needs_of(config, gpus=gpus > 0)
    anywhere = {role: replace(need, nodelist=None, exclude=None) for role, need in needs.items()}
    cores, taken, memory = most_on_a_node(needs, place_workers(anywhere, nodes, gpus))
    listed = {need.nodelist for need in needs.values()}
    requests_memory = all(need.mem is not None for need in needs.values())
    options = {
        "job-name": f"{config.experiment_name}_{config.trial_name}",
        "nodes": str(cluster.n_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cores),
        "gres": f"gpu:{taken}" if taken else "",
        # The job needs the nodes of all roles, and may exclude only nodes that every role excludes.
        "nodelist": ",".join(sorted(filter(None, listed))),
        "exclude": _common({need.exclude or "" for need in needs.values()}),
        "mem": f"{memory}G" if requests_memory else "",
        "output": str(folder.resolve() / OUTPUT),
        "open-mode": "append",
        "signal": f"B:TERM@{_WARNING_S}",
    }
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value]
    lines.append("#SBATCH --requeue" if config.recover.enabled else "#SBATCH --no-requeue")
    driver = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=0"]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"cd {shlex.quote(os.getcwd())}",
            "# The run is a separate job step. On scancel or requeueing, the step gets SIGTERM and saves before it ends.",
            f'{shlex.join(driver)} --nodelist="$SLURMD_NODENAME" {shlex.join(command)} &',
            "step=$!",
            "# SIGTERM to srun itself would kill the step.",
            """trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"; wait $step' TERM""",
            "wait $step",
            "",
        ]
    )


def _common(values: set[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def driver_command(words: Sequence[str]) -> list[str]:
    """Return the command line of ``areno run`` with the given arguments."""
    return [*python_command(), "-m", "areno", "run", *words]


def submit(config: BaseExperimentConfig, words: Sequence[str]) -> int:
    """Submit the experiment as a job, show its output until the job ends, and return its exit code. Ctrl-C cancels the job.

    Raises:
        EngineError: Slurm rejected the job, or did not respond in time.
        UsageError: Slurm is not installed.
    """
    folder = ExperimentFolders.of(config).create().path
    script, output = folder / SCRIPT, folder / OUTPUT
    script.write_text(batch_script(config, driver_command(words)), encoding="utf-8")
    shown = output.stat().st_size if output.exists() else 0
    job = slurm_steps.run(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
    sys.stderr.write(f"job {job} was submitted ({script}); its output goes to {output}\n")
    try:
        code = None
        while code is None:
            time.sleep(_POLL_S)
            code = slurm_steps.exit_code_of(job)
            shown = _show(output, shown)
        return code
    except KeyboardInterrupt:
        slurm_steps.run(["scancel", job])
        sys.stderr.write(f"job {job} was cancelled; waiting until the job has saved its state and ended\n")
        while slurm_steps.exit_code_of(job) is None:
            time.sleep(_POLL_S)
        _show(output, shown)
        return 128 + signal.SIGINT


def _show(output: Path, shown: int) -> int:
    """Print the output after the first ``shown`` bytes, and return the new value of ``shown``."""
    if not output.exists():
        return shown
    with open(output, "rb") as file:
        file.seek(shown)
        text = file.read()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(text)
