"""Options of the groups Basic, Checkpoint, Evaluation and Observability: what to run, where its files go, how it is judged."""

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
    """What to train, on which data, for how long and on which devices."""

    ckpt: str | None = _basic(
        None,
        path="place",
        help="Model and tokenizer to train: a folder in Hugging Face format, a .gguf file or a repo id. Required.",
    )
    dataset_path: str | None = _basic(
        None,
        path="place",
        help="Training data: a JSON, JSONL, Parquet, CSV, TSV or Arrow file, a folder of them, a save_to_disk folder, "
        "or a hub reference name[:config[:split]] such as gsm8k:main. Required.",
    )
    dataset_loader_fn: str | None = _basic(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        help="Python function that turns the data into rows of the algorithm's schema; the function is "
        "load_training_dataset unless named. SFT needs one.",
    )
    algo: str = _basic(
        "gspo",
        path="python",
        help="Training algorithm: gspo, grpo, dapo, cispo, sapo, m2po, icepop, gmpo, ppo, sft, dpo, simpo, rm (a reward "
        "model), one that an installed package registers, or your own as file.py:NAME.",
    )
    epochs: int = _basic(10, minimum=1, changes_results=False, help="Passes over the data set.")
    max_steps: int | None = _basic_free(
        None, minimum=1, unset="no limit", help="Stop after this many steps, whatever the epoch."
    )
    max_sequences: int | None = _basic_free(
        None,
        minimum=1,
        unset="no limit",
        help="Stop after the step in which this many sequences have been trained on, whatever the epoch.",
    )
    world_size: int = _basic_free(
        1,
        minimum=1,
        documented_default="all visible GPUs (8 on a node with 8); 1 on a CPU",
        help="Number of devices, or of processes on a CPU. Must be divisible by --tp-size.",
    )
    tp_size: int = _basic_free(
        1,
        minimum=1,
        documented_default="4 on 8 GPUs, if the model can be divided so; else 1",
        help="Devices that share one copy of the model (tensor parallel).",
    )
    fsdp: bool = _basic_free(
        False,
        help="Spread weights and gradients over the replicas (FSDP2), which otherwise share the optimizer's state alone: "
        "for models that do not fit. Needs --world-size 2 or more.",
    )
    stall_timeout: float = _basic_free(
        600.0,
        above=0,
        metavar="SECONDS",
        help="End the run when a rank of several has work and makes no progress for so long.",
    )
    seed: int = _basic(
        0,
        minimum=0,
        maximum=2**32 - 1,
        help="Fixes the data order and every random draw; the same seed repeats the run, bit for bit with the same number "
        "of CPU threads (OMP_NUM_THREADS fixes it).",
    )
    shuffle: bool = _basic(True, help="Visit the rows in a new random order each epoch, drawn from --seed.")
    device: str = _basic_free(
        "auto", metavar="[auto|cpu|cuda|cuda:N]", help="Where to run; auto takes a CUDA device if there is one."
    )
    dtype: str = _basic(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Compute type; auto is float32 on a CPU, bfloat16 on CUDA.",
    )
    trust_remote_code: bool = _basic_free(
        False, help="Run Python code that ships inside the checkpoint. Only for sources you trust."
    )
    config: str | None = _basic_free(
        None, metavar="FILE", stored=False, help="YAML file of option names and values; flags win."
    )
    dry_run: bool = _basic_free(
        False,
        stored=False,
        help="Check everything, print the resolved configuration and the memory plan, and run nothing.",
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
        path="place",
        metavar="PATH",
        unset="<run>/checkpoints",
        help="Directory for checkpoints, written as step_000100 and so on. The last step is always saved.",
    )
    save_interval: int = _checkpoint(100, minimum=1, help="Save every N steps.")
    save_interval_minutes: float | None = _checkpoint(
        None, above=0, unset="by steps alone", help="Save also whenever N minutes have passed."
    )
    keep_checkpoints: int | None = _checkpoint(
        None,
        minimum=1,
        unset="keep all",
        help="Keep only the newest N checkpoints. Once an update was unusable, the last one from before it stays as well.",
    )
    keep_best: bool = _checkpoint(
        False, help="Also keep the checkpoint with the best evaluation, as the folder best beside the others."
    )
    model_save_interval: int | None = _checkpoint(
        None,
        minimum=1,
        unset="checkpoints alone",
        help="Also save the model alone every N steps, in Hugging Face format, as models/step_000100 beside the checkpoints; "
        "these are never deleted.",
    )
    save_async: bool = _checkpoint(
        True,
        help="Write the models of --model-save-interval from a copy while training goes on, where one process has the whole "
        "model; the copy takes the memory of the weights.",
    )
    resume: str | None = _checkpoint(
        None,
        metavar="PATH",
        stored=False,
        bare="auto",
        unset="start anew",
        help="Continue the run in this directory; without a PATH, the newest run with the same configuration.",
    )
    resume_step: int | None = _checkpoint(
        None,
        minimum=1,
        stored=False,
        unset="the newest whole checkpoint",
        help="Continue from the checkpoint after N steps; later checkpoints are kept under hidden names.",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Measuring the model on rows that it is not trained on."""

    eval_dataset_path: str | None = _evaluation(
        None, path="place", unset="no evaluation", help="Held-out data, in any form that --dataset-path takes."
    )
    eval_dataset_loader_fn: str | None = _evaluation(
        None,
        path="python",
        metavar="FILE.PY[:FUNCTION]",
        unset="--dataset-loader-fn",
        help="Loader of the held-out data where it needs another one.",
    )
    eval_interval: int = _evaluation(100, minimum=1, help="Evaluate every N steps, and after the last.")
    eval_before_train: bool = _evaluation(True, help="Evaluate once before the first step, to know where it starts.")
    early_stop_patience: int | None = _evaluation(
        None, minimum=1, unset="never", help="End the run after N evaluations in a row that were not the best one."
    )
    eval_max_rows: int | None = _evaluation(None, minimum=1, unset="all", help="Use only the first N held-out rows.")
    eval_n_samples: int = _evaluation(
        1, minimum=1, rollout_only=True, help="Completions per held-out prompt; pass@k is reported up to this k."
    )
    eval_temperature: float | None = _evaluation(
        None,
        above=0,
        rollout_only=True,
        unset="--temperature, greedy for one sample",
        help="Sampling temperature of the evaluation.",
    )


@dataclass(frozen=True, kw_only=True)
class ObservabilityOptions:
    """Where metrics go."""

    metrics_log_dir: str | None = _observability(
        None, path="place", metavar="PATH", unset="<run>/events", help="Directory for TensorBoard event files."
    )
    track: tuple[str, ...] = _observability(
        (),
        metavar="SERVICE",
        help="Also send all metrics to a service: wandb, swanlab or trackio; WANDB_MODE and SWANLAB_MODE choose its mode. "
        "Repeatable.",
    )
    track_project: str = _observability(
        "areno", metavar="NAME", help="Project that services show the run in, under the name of the run directory."
    )
    trace: bool = _observability(
        False,
        help="Write where the time of each step goes, as events for Perfetto, to perf_tracer/ in the run directory.",
    )
