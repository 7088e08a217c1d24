"""Options of the groups Basic, Checkpoint and Observability: what to run, on what, and where its files go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

_basic = partial(option, group="Basic")
_checkpoint = partial(option, group="Checkpoint", changes_results=False)

_ONE_DEVICE = "this version runs on one device; leave it out or set it to 1"


@dataclass(frozen=True, kw_only=True)
class BasicOptions:
    """What to train, on which data, for how long and on which devices."""

    ckpt: str | None = _basic(
        None, help="Model and tokenizer to train: a folder in Hugging Face format or a repo id. Required."
    )
    dataset_path: str | None = _basic(
        None,
        help="Training data: a JSON, JSONL, Parquet, CSV, TSV or Arrow file, a folder of them, a save_to_disk folder, "
        "or a hub reference name[:config[:split]] such as gsm8k:main. Required.",
    )
    dataset_loader_fn: str | None = _basic(
        None,
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that turns the data into rows of the algorithm's schema; the function is "
        "load_training_dataset unless named. SFT needs one.",
    )
    algo: str = _basic(
        "gspo",
        help="Training algorithm: gspo, grpo, sft, dpo, ppo (the last two are not in this version), one that an "
        "installed package registers, or your own as file.py:NAME.",
    )
    epochs: int = _basic(10, minimum=1, changes_results=False, help="Passes over the data set.")
    max_steps: int | None = _basic(
        None, minimum=1, changes_results=False, unset="no limit", help="Stop after this many steps, whatever the epoch."
    )
    world_size: int = _basic(
        1,
        minimum=1,
        documented_default="8 on a node with 8 GPUs; here 1",
        later=_ONE_DEVICE,
        later_above=1,
        help="Number of devices. Must be divisible by --tp-size.",
    )
    tp_size: int = _basic(
        1,
        minimum=1,
        documented_default="4 on a node with 8 GPUs; here 1",
        later=_ONE_DEVICE,
        later_above=1,
        help="Devices that share one copy of the model (tensor parallel).",
    )
    seed: int = _basic(
        0,
        minimum=0,
        maximum=2**32 - 1,
        help="Fixes the data order and every random draw; the same seed repeats the run.",
    )
    shuffle: bool = _basic(True, help="Visit the rows in a new random order each epoch, drawn from --seed.")
    device: str = _basic(
        "auto",
        metavar="[auto|cpu|cuda|cuda:N]",
        changes_results=False,
        help="Where to run; auto takes a CUDA device if there is one.",
    )
    dtype: str = _basic(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Compute type; auto is float32 on a CPU, bfloat16 on CUDA.",
    )
    trust_remote_code: bool = _basic(
        False,
        changes_results=False,
        help="Run Python code that ships inside the checkpoint. Only for sources you trust.",
    )
    config: str | None = _basic(
        None,
        metavar="FILE",
        changes_results=False,
        stored=False,
        help="YAML file of option names and values; flags win.",
    )
    dry_run: bool = _basic(
        False,
        changes_results=False,
        stored=False,
        help="Check everything, print the resolved configuration and a memory estimate, and run nothing.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved, where, and how a run is continued."""

    run_dir: str | None = _checkpoint(
        None,
        metavar="PATH",
        stored=False,
        unset="runs/<algo>-<time>",
        help="Directory that holds everything of the run.",
    )
    save_path: str | None = _checkpoint(
        None,
        metavar="PATH",
        unset="<run>/checkpoints",
        help="Directory for checkpoints, written as step_000100 and so on. The last step is always saved.",
    )
    save_interval: int = _checkpoint(100, minimum=1, help="Save every N steps.")
    keep_checkpoints: int | None = _checkpoint(
        None, minimum=1, unset="keep all", help="Keep only the newest N checkpoints."
    )
    resume: str | None = _checkpoint(
        None,
        metavar="PATH",
        stored=False,
        bare="auto",
        unset="start anew",
        help="Continue the run in this directory; without a PATH, the newest run with the same configuration.",
    )


@dataclass(frozen=True, kw_only=True)
class ObservabilityOptions:
    """Where metrics go."""

    metrics_log_dir: str | None = option(
        None,
        group="Observability",
        metavar="PATH",
        changes_results=False,
        unset="<run>/events",
        help="Directory for TensorBoard event files.",
    )
