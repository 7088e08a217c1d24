"""Options of ``areno eval`` and ``areno export``. Most of these options are training options, some with shorter names.

Options of ``areno eval`` are mapped to `TrainOptions`, so that ``areno eval`` and evaluation during training share their code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areno.config.all_train_options import TrainOptions
from areno.config.options import option, options_of
from areno.config.packages import missing_packages
from areno.config.parser import CommandOptions, CommandText, parse_command
from areno.config.paths import ckpt_problem, is_address, unwritable
from areno.config.rollout_options import RolloutOptions
from areno.config.run_options import BasicOptions, EvaluationOptions
from areno.config.splits import TEST
from areno.config.train_options import UpdateOptions
from areno.config.validate import as_argument, decoding_problems, shared_problems, value_problems
from areno.storage.run_layout import newest_model

_EVAL = CommandText(
    "areno eval",
    "areno eval --ckpt MODEL --dataset-path DATA --reward-fn-path FILE.PY [--n-samples N] [options]",
    "Evaluate a model: answer the prompts of a dataset, score the answers, and report accuracy and pass@k.",
)

_EXPORT = CommandText(
    "areno export",
    "areno export --ckpt ADAPTER --output FOLDER [--dtype TYPE] [--gguf TYPE]",
    "Write a full checkpoint in Hugging Face format, and optionally a GGUF file; an adapter is merged into its base model.",
)

_RENAMED = {"max_rows": "eval_max_rows", "n_samples": "eval_n_samples", "temperature": "eval_temperature"}
_EVAL_ONLY = ("output", "json", "model")
# Options that a server decides, that its protocol lacks, or that need the tokens of the prompts.
_LOCAL_MODEL_ONLY = (
    *("device", "dtype", "trust_remote_code", "max_prompt_tokens", "max_context_len", "top_k", "stop_token_ids"),
    *("ignore_eos", "kv_cache_tokens", "attn_backend", "disable_thinking", "reward_ckpt"),
)


def option_from(declaration: type, name: str, **changes: Any) -> Any:
    """Copy the option ``name`` of the dataclass ``declaration``, for use in another dataclass of options.

    If the original is only for some training algorithms, the copy does not have this restriction. ``changes`` contains
    new metadata or a new default for the copy.
    """
    entry = next(entry for entry in options_of(declaration) if entry.name == name)
    info = asdict(entry.info) | {"algorithms": ()} | changes
    return option(info.pop("default", entry.default), **info)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CommandOptions):
    """All options of ``areno eval``."""

    ckpt: str | None = option_from(
        BasicOptions,
        "ckpt",
        help="Model to evaluate: a folder in Hugging Face format, a .gguf file, a repo id, a run directory (its newest "
        "model), or the address of an OpenAI-compatible server, such as http://HOST:8000/v1. Required.",
    )
    model: str | None = option(
        None,
        group="Basic",
        metavar="NAME",
        unset="the server's first model",
        help="Name of the model on the server, if --ckpt is the address of a server.",
    )
    dataset_path: str | None = option_from(
        BasicOptions,
        "dataset_path",
        help="Prompts: a JSON, JSONL, Parquet, CSV, TSV or Arrow file, a folder of such files, a save_to_disk folder, or a hub "
        "reference name[:config[:split]] such as gsm8k:main:test. Required.",
    )
    dataset_loader_fn: str | None = option_from(
        BasicOptions,
        "dataset_loader_fn",
        help="Python function that converts the data to rows; each row needs a prompt. If you give only FILE.PY, areno calls "
        "the function load_training_dataset in this file.",
    )
    seed: int = option_from(BasicOptions, "seed", help="Seed of all sampling; the same seed reproduces the evaluation.")
    device: str = option_from(BasicOptions, "device")
    dtype: str = option_from(BasicOptions, "dtype")
    trust_remote_code: bool = option_from(BasicOptions, "trust_remote_code")

    max_running_prompts: int = option_from(RolloutOptions, "max_running_prompts", default=256, unset="")
    max_prompt_tokens: int = option_from(RolloutOptions, "max_prompt_tokens")
    max_new_tokens: int = option_from(RolloutOptions, "max_new_tokens", help="Maximum tokens of an answer.")
    max_context_len: int | None = option_from(
        RolloutOptions,
        "max_context_len",
        help="Maximum tokens of prompt and answer together. The model's limit also applies.",
    )
    temperature: float | None = option_from(
        EvaluationOptions,
        "eval_temperature",
        group="Rollout",
        unset="1.0, or greedy decoding if --n-samples is 1",
        remedy="for greedy decoding use --greedy",
        help="Sampling temperature.",
    )
    top_k: int = option_from(RolloutOptions, "top_k")
    top_p: float = option_from(RolloutOptions, "top_p")
    greedy: bool = option_from(RolloutOptions, "greedy")
    stop: tuple[str, ...] = option_from(RolloutOptions, "stop")
    stop_token_ids: tuple[int, ...] = option_from(RolloutOptions, "stop_token_ids")
    ignore_eos: bool = option_from(RolloutOptions, "ignore_eos")
    kv_cache_tokens: int | None = option_from(RolloutOptions, "kv_cache_tokens")
    attn_backend: str = option_from(RolloutOptions, "attn_backend")
    disable_thinking: bool = option_from(RolloutOptions, "disable_thinking")
    reward_fn_path: str | None = option_from(RolloutOptions, "reward_fn_path")
    reward_weights: str | None = option_from(RolloutOptions, "reward_weights")
    reward_ckpt: str | None = option_from(RolloutOptions, "reward_ckpt")
    reward_timeout_s: float = option_from(RolloutOptions, "reward_timeout_s")
    reward_workers: int | None = option_from(RolloutOptions, "reward_workers")
    reward_memory_gb: float | None = option_from(RolloutOptions, "reward_memory_gb")
    on_reward_error: str = option_from(
        RolloutOptions,
        "on_reward_error",
        help="What to do if a sample gets no valid reward: end the evaluation (stop), or exclude the sample from the averages "
        "and count the failure (drop).",
    )
    score_micro_bs: int = option_from(
        UpdateOptions, "score_micro_bs", group="Rollout", help="Answers per forward pass of the reward model."
    )

    max_rows: int | None = option_from(EvaluationOptions, "eval_max_rows", help="Use only the first N rows.")
    n_samples: int = option_from(
        EvaluationOptions, "eval_n_samples", help="Answers per prompt; pass@k is reported for k up to this number."
    )
    output: str | None = option(
        None,
        group="Evaluation",
        metavar="FILE.JSONL",
        unset="not written",
        help="Write every answer with its reward to this file.",
    )
    json: bool = option(False, group="Evaluation", help="Print one line of JSON instead of a table.")

    def as_train_options(self) -> TrainOptions:
        """Return the equivalent options of ``areno train``."""
        names = [entry.name for entry in options_of(EvalOptions) if entry.name not in _EVAL_ONLY]
        values = {_RENAMED.get(name, name): getattr(self, name) for name in names}
        return TrainOptions(**values | ({"ckpt": None} if is_address(self.ckpt) else {}), run_dir="")


def parse_eval(argv: Sequence[str]) -> EvalOptions:
    """Parse and check the arguments of ``areno eval``.

    A run directory in ``--ckpt`` or ``--reward-ckpt`` is replaced by the run's newest model.
    """
    return parse_command(argv, EvalOptions, _EVAL, _with_checkpoints, _problems)


def _with_checkpoints(options: EvalOptions) -> EvalOptions:
    ckpt, reward_ckpt = options.ckpt, options.reward_ckpt
    return replace(
        options,
        ckpt=ckpt if not ckpt or is_address(ckpt) else newest_model(ckpt, "--ckpt"),
        reward_ckpt=reward_ckpt and newest_model(reward_ckpt, "--reward-ckpt"),
    )


def _problems(options: EvalOptions) -> Iterator[str]:
    if not options.ckpt:
        yield "--ckpt is required; give a model folder, a run directory or a repo id such as Qwen/Qwen3-0.6B"
    if not options.dataset_path:
        yield "--dataset-path is required; give a data file, a folder or a hub reference such as gsm8k:main:test"
    if not options.reward_fn_path and not options.reward_ckpt:
        yield (
            "--reward-fn-path or --reward-ckpt is required; give --reward-fn-path file.py, where file.py defines "
            "reward_fn(record), or give --reward-ckpt MODEL, where MODEL is a reward model"
        )
    yield from value_problems(options)
    entries = {entry.name: entry for entry in options_of(EvalOptions)}
    for name, because in _unused(options):
        if name in options.explicit:
            yield f"{as_argument(entries[name], getattr(options, name))} {because}"
    train = options.as_train_options()
    yield from decoding_problems(train)
    yield from shared_problems(train, TEST)
    if options.output is not None:
        path = Path(options.output).expanduser()
        if not options.output or path.is_dir():
            yield f"--output {options.output!r} is not a file name; pass a file name such as samples.jsonl"
        else:
            yield unwritable(path.parent, "--output")


def _unused(options: EvalOptions) -> Iterator[tuple[str, str]]:
    if is_address(options.ckpt):
        for name in _LOCAL_MODEL_ONLY:
            yield name, "has no effect if --ckpt is the address of a server; remove the option"
    else:
        yield (
            "model",
            "has no effect on a local model, because the option selects a model on a server; remove the option",
        )
    if options.greedy:
        for name in ("temperature", "top_k", "top_p"):
            yield name, "has no effect with --greedy; use only one of them"
        if options.n_samples > 1:
            yield (
                "n_samples",
                "has no effect with --greedy, which gives the same answer each time; use only one of them",
            )
    elif options.temperature is None and options.n_samples == 1:
        for name in ("top_k", "top_p"):
            yield (
                name,
                "has no effect, because a single answer is decoded greedily; set --temperature or --n-samples too",
            )
    if options.reward_ckpt:
        yield "reward_fn_path", "has no effect with --reward-ckpt, which provides the reward; use only one of them"
        for name in ("reward_weights", "reward_timeout_s", "reward_workers", "reward_memory_gb"):
            yield name, "has no effect with --reward-ckpt, which runs no reward function; remove the option"
    else:
        yield "score_micro_bs", "has no effect without --reward-ckpt; remove the option"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """All options of ``areno export``."""

    ckpt: str | None = option_from(
        BasicOptions,
        "ckpt",
        help="What to export: the folder of an adapter or of a full model, a .gguf file, or a run directory (its newest "
        "model). Required.",
    )
    output: str | None = option(None, group="Basic", metavar="FOLDER", help="Folder to write to. Required.")
    dtype: str = option_from(
        BasicOptions,
        "dtype",
        help="Dtype of the written weights; auto keeps the dtype of the base model. An adapter is merged in float32.",
    )
    gguf: str | None = option(
        None,
        group="Basic",
        choices=("f32", "f16", "bf16", "q8_0"),
        help="Also write the model as model-TYPE.gguf, for llama.cpp and Ollama, with the weight matrices stored as TYPE.",
    )
    trust_remote_code: bool = option_from(BasicOptions, "trust_remote_code")


def parse_export(argv: Sequence[str]) -> ExportOptions:
    """Parse and check the arguments of ``areno export``."""
    return parse_command(argv, ExportOptions, _EXPORT, _with_model, _export_problems)


def _with_model(options: ExportOptions) -> ExportOptions:
    return replace(options, ckpt=options.ckpt and newest_model(options.ckpt, "--ckpt"))


def _export_problems(options: ExportOptions) -> Iterator[str]:
    if not options.ckpt:
        yield "--ckpt is required; give an adapter, a model folder or a run directory"
    else:
        yield ckpt_problem(options.ckpt)
    yield from value_problems(options)
    if options.gguf and (missing := missing_packages("gguf")):
        yield f"--gguf needs {missing}"
    if not options.output:
        yield "--output is required; give the folder to write to"
        return
    folder = Path(options.output).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        yield f"--output {options.output} is not empty; choose a new folder"
    yield unwritable(folder, "--output")
