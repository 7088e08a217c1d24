"""Options of the groups Basic, Checkpoint, Evaluation and Observability."""

from dataclasses import dataclass
from functools import partial

from areno.config.options import option

_basic = partial(option, group="Basic")
_basic_free = partial(_basic, changes_results=False)
_checkpoint = partial(option, group="Checkpoint", changes_results=False)
_evaluation = partial(option, group="Evaluation", changes_results=False)
_observability = partial(option, group="Observability", changes_results=False)


@dataclass(frozen=True, kw_only=True)
class BasicOptions:
    """Model, data, algorithm, duration and devices."""

    ckpt: str | None = _basic(
        None,
        path="place",
        help="Model to train, with its tokenizer: a folder in Hugging Face format, a .gguf file or a repo id. Required.",
    )
    dataset_path: str | None = _basic(
        None,
        path="place",
        help="Training data: a JSON, JSONL, Parquet, CSV, TSV or Arrow file, a folder of such files, a "
        "save_to_disk folder or a hub reference. A hub reference is name[:config[:split]], such as "
        "gsm8k:main. Required.",
    )
    dataset_loader_fn: str | None = _basic(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that converts the data to the rows that the algorithm needs. Without :FUNCTION, areno calls the "
        "function load_training_dataset in FILE.PY. Required for SFT.",
    )
    algo: str = _basic(
        "gspo",
        path="python",
        help="Training algorithm: gspo, grpo, dapo, cispo, sapo, m2po, icepop, gmpo, ppo, sft, dpo, simpo, rm (a reward "
        "model), an algorithm of an installed package, or your own as file.py:NAME.",
    )
    epochs: int = _basic(10, minimum=1, changes_results=False, help="Number of passes over the dataset.")
    max_steps: int | None = _basic_free(
        None, minimum=1, unset="no limit", help="Stop after this many steps, even within an epoch."
    )
    max_sequences: int | None = _basic_free(
        None,
        minimum=1,
        unset="no limit",
        help="Stop after the step that reaches this many trained sequences, even within an epoch.",
    )
    world_size: int = _basic_free(
        1,
        minimum=1,
        documented_default="all visible GPUs that rollout does not use; 1 on a CPU",
        help="Number of devices (processes on a CPU), which must be divisible by --tp-size.",
    )
    tp_size: int = _basic_free(
        1,
        minimum=1,
        documented_default="4 if training uses 8 GPUs, the model supports a size of 4, enough GPUs remain for rollout, and "
        "neither --fsdp nor --load-in-4bit is set; otherwise 1",
        help="Tensor-parallel size: the number of devices across which each copy of the model is sharded.",
    )
    fsdp: bool = _basic_free(
        False,
        help="Shard weights and gradients across the data-parallel ranks (FSDP2), for models that are too large "
        "for one device. By default, only optimizer states are sharded. With --fsdp, --world-size must be at "
        "least twice --tp-size.",
    )
    stall_timeout: float = _basic_free(
        600.0,
        above=0,
        metavar="SECONDS",
        help="Abort a run with several ranks if one rank makes no progress for this many seconds.",
    )
    seed: int = _basic(
        0,
        minimum=0,
        maximum=2**32 - 1,
        help="Random seed for the data order and sampling. With --eager-decode and a fixed OMP_NUM_THREADS, a run "
        "on a CPU is bit-for-bit reproducible.",
    )
    shuffle: bool = _basic(True, help="Shuffle the rows before each epoch. --seed determines the order.")
    device: str = _basic_free(
        "auto", metavar="[auto|cpu|cuda|cuda:N]", help="Device to run on. auto selects CUDA if available."
    )
    dtype: str = _basic(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Compute dtype. auto is float32 on a CPU and bfloat16 on CUDA.",
    )
    trust_remote_code: bool = _basic_free(
        False, help="Run Python code from the checkpoint. Use this option only for sources that you trust."
    )
    config: str | None = _basic_free(
        None,
        metavar="FILE",
        stored=False,
        help="YAML file with option names and values. Flags override the file.",
    )
    dry_run: bool = _basic_free(
        False,
        stored=False,
        help="Check the options, and the files and Python functions that they name, without training. areno prints the "
        "resolved configuration and the memory plan, and exits.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints and resuming."""

    run_dir: str | None = _checkpoint(
        None,
        metavar="PATH",
        stored=False,
        unset="runs/<algo>-<time>",
        help="Directory for all outputs of the run.",
    )
    save_path: str | None = _checkpoint(
        None,
        path="place",
        metavar="PATH",
        unset="<run>/checkpoints",
        help="Directory for checkpoints (step_000100 and so on). The last step is always saved.",
    )
    save_interval: int = _checkpoint(100, minimum=1, help="Save a checkpoint every N steps.")
    save_interval_minutes: float | None = _checkpoint(
        None, above=0, unset="no time interval", help="Also save a checkpoint whenever N minutes have passed."
    )
    keep_checkpoints: int | None = _checkpoint(
        None,
        minimum=1,
        unset="keep all checkpoints",
        help="Keep only the newest N checkpoints. If an update's loss or gradient norm is not finite, areno also keeps the "
        "last checkpoint before the first such update.",
    )
    keep_best: bool = _checkpoint(
        False,
        help="Also keep the checkpoint with the best evaluation, in the folder `best` next to the other checkpoints.",
    )
    model_save_interval: int | None = _checkpoint(
        None,
        minimum=1,
        unset="no separate models",
        help="Every N steps, also save the model without training state, in Hugging Face format. The folders are named "
        "models/step_000100 and so on, next to the checkpoints. areno never deletes these models.",
    )
    save_async: bool = _checkpoint(
        True,
        help="Save models in the background if training has only one rank and no adapter; otherwise, training waits. "
        "--model-save-interval sets when models are saved. Background writing needs memory for a copy of the weights.",
    )
    resume: str | None = _checkpoint(
        None,
        metavar="PATH",
        stored=False,
        bare="auto",
        unset="start a new run",
        help="Resume the run in this directory. Without a PATH, resume the newest run with the same configuration.",
    )
    resume_step: int | None = _checkpoint(
        None,
        minimum=1,
        stored=False,
        unset="the newest complete checkpoint",
        help="Resume from the checkpoint of step N. areno renames the checkpoints of later steps (.rewound-...).",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation on held-out data."""

    eval_dataset_path: str | None = _evaluation(
        None, path="place", unset="no evaluation", help="Held-out data, in any format of --dataset-path."
    )
    eval_dataset_loader_fn: str | None = _evaluation(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        unset="--dataset-loader-fn",
        help="Python function that converts the held-out data to rows. Set this option if the function for the training data "
        "cannot convert the held-out data.",
    )
    eval_interval: int = _evaluation(100, minimum=1, help="Evaluate every N steps, and after the last step.")
    eval_before_train: bool = _evaluation(True, help="Also evaluate before the first step, as a baseline.")
    early_stop_patience: int | None = _evaluation(
        None,
        minimum=1,
        unset="never",
        help="Stop the run after N consecutive evaluations without a new best result.",
    )
    eval_max_rows: int | None = _evaluation(
        None, minimum=1, unset="all rows", help="Use only the first N held-out rows."
    )
    eval_n_samples: int = _evaluation(
        1,
        minimum=1,
        rollout_only=True,
        help="Completions per held-out prompt. areno reports pass@k for k up to this number.",
    )
    eval_temperature: float | None = _evaluation(
        None,
        above=0,
        rollout_only=True,
        unset="greedy decoding if --greedy is set or --eval-n-samples is 1, otherwise --temperature",
        help="Sampling temperature of the evaluation.",
    )


@dataclass(frozen=True, kw_only=True)
class ObservabilityOptions:
    """Metrics and traces."""

    metrics_log_dir: str | None = _observability(
        None, path="place", metavar="PATH", unset="<run>/events", help="Directory for TensorBoard event files."
    )
    track: tuple[str, ...] = _observability(
        (),
        metavar="SERVICE",
        help="Also log all metrics to a service: wandb, swanlab, trackio or mlflow. Repeatable. The environment "
        "variables WANDB_MODE, SWANLAB_MODE and TRACKIO_MODE set the mode of a service (such as offline for wandb), and "
        "MLFLOW_TRACKING_URI sets the address of the MLflow server.",
    )
    track_project: str = _observability(
        "areno",
        metavar="NAME",
        help="Name of the project to which the run belongs in the tracking services (--track). The run itself has the name "
        "of its run directory.",
    )
    save_rollouts: str | None = _observability(
        None,
        metavar="[N|all]",
        rollout_only=True,
        unset="none",
        help="Save the training rows of the newest N steps, or of all steps, to rollouts/ in the run directory. "
        "`areno replay` reads these rows.",
    )
    trace: bool = _observability(
        False,
        help="Write a performance trace of each step to perf_tracer/ in the run directory, for Perfetto.",
    )
    log_level: str = _observability(
        "auto",
        choices=("auto", "debug", "info", "warning", "error"),
        stored=False,
        help="Minimum level of log lines on the console. auto uses the environment variable ARENO_LOG_LEVEL, or "
        "else info. If you set debug or info, a terminal shows log lines instead of the live display. The "
        "file log.txt contains all levels.",
    )
