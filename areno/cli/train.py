"""``areno train``: prepares the run, prints its summary, and trains.

The flags are fields of dataclasses in ``run_options.py``, ``rollout_options.py`` and ``train_options.py`` of
``areno/config``. Some algorithms in ``areno/algorithms`` add their own flags. The training run is implemented in
:mod:`areno.api.run_training`.
"""

from collections.abc import Sequence

from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.parser import train_help
from areno.config.prepare import prepare_run
from areno.config.resume import claim_run_dir
from areno.config.summary import format_summary
from areno.config.yaml_io import dump_config
from areno.gpus import visible_gpus


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    if "-h" in argv or "--help" in argv:
        print(train_help(argv), end="")
        return 0
    prepared = prepare_run(argv)
    options = prepared.options if prepared.options.dry_run else claim_run_dir(prepared.options)
    print(format_summary(options, get_algorithm(options.algo), gpus=visible_gpus()))
    if options.dry_run:
        return _dry_run(options)
    from areno.api.run_training import run_training

    return run_training(options, loader_fn=prepared.loader_fn)


def _dry_run(options: TrainOptions) -> int:
    from areno.engine.plan.memory_plan import make_plan
    from areno.engine.plan.table import plan_text

    print("\nResolved configuration\n----------------------")
    print(dump_config(options), end="")
    print("\nMemory\n------")
    print("not estimated with --fsdp" if options.fsdp else plan_text(options, make_plan(options)))
    if options.uses_replicas:
        print("(for the trainer process only; each rollout process has its own model and cache)")
    return 0
