"""Options of ``areno eval`` and ``areno export``: those of training that matter, under shorter names where they are their own.

Those of ``areno eval`` are mapped to `TrainOptions`: the code that evaluates a run measures a checkpoint, and equally.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areno.config.options import flag_of, option, options_of
from areno.config.packages import missing_packages
from areno.config.parser import CommandOptions, CommandText, parse_command
from areno.config.paths import ckpt_problem, is_address, unwritable
from areno.config.rollout_options import RolloutOptions
from areno.config.run_options import BasicOptions, EvaluationOptions
from areno.config.splits import TEST
from areno.config.train_options import TrainOptions
from areno.config.update_options import UpdateOptions
from areno.config.validate import decoding_problems, shared_problems, value_problems
from areno.storage.run_layout import newest_model

_EVAL = CommandText(
    "areno eval",
    "areno eval --ckpt MODEL --dataset-path DATA --reward-fn-path FILE.PY [--n-samples N] [options]",
    "Measure a model: answer the prompts of a data set, reward the answers, report accuracy and pass@k.",
)

_EXPORT = CommandText(
    "areno export",
    "areno export --ckpt ADAPTER --output FOLDER [--dtype TYPE] [--gguf TYPE]",
    "Write a full checkpoint in Hugging Face format, and as GGUF: an adapter is added to its base model's weights.",
)

_RENAMED = {"max_rows": "eval_max_rows", "n_samples": "eval_n_samples", "temperature": "eval_temperature"}
_OWN = ("output", "json", "model")
# What a server decides by itself, or what its protocol has no word for.
_OF_MODEL = (
    *("device", "dtype", "trust_remote_code", "max_prompt_tokens", "max_context_len", "top_k", "stop_token_ids"),
    *("ignore_eos", "kv_cache_tokens", "attn_backend", "disable_thinking", "reward_ckpt"),
)


def as_in(declaration: type, name: str, **changes: Any) -> Any:
    """The option that another command declares, for every algorithm, with some of its texts or its default changed."""
    entry = next(entry for entry in options_of(declaration) if entry.name == name)
    info = asdict(entry.info) | {"algorithms": ()} | changes
    return option(info.pop("default", entry.default), **info)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CommandOptions):
    """All options of ``areno eval``."""

    ckpt: str | None = as_in(
        BasicOptions,
        "ckpt",
        help="Model to measure: a folder in Hugging Face format, a .gguf file, a repo id, a run directory, whose newest "
        "checkpoint is taken, or the address of a server of the OpenAI protocol, such as http://HOST:8000/v1. Required.",
    )
    model: str | None = option(
        None, group="Basic", metavar="NAME", unset="its first", help="Name of the model at the server of --ckpt."
    )
    dataset_path: str | None = as_in(
        BasicOptions,
        "dataset_path",
        help="Prompts: a JSON, JSONL, Parquet, CSV, TSV or Arrow file, a folder of them, a save_to_disk folder, or a hub "
        "reference name[:config[:split]] such as gsm8k:main:test. Required.",
    )
    dataset_loader_fn: str | None = as_in(
        BasicOptions,
        "dataset_loader_fn",
        help="Python function that turns the data into rows with a prompt; it is load_training_dataset unless named.",
    )
    seed: int = as_in(BasicOptions, "seed", help="Fixes every draw; the same seed repeats the measurement.")
    device: str = as_in(BasicOptions, "device")
    dtype: str = as_in(BasicOptions, "dtype")
    trust_remote_code: bool = as_in(BasicOptions, "trust_remote_code")

    max_running_prompts: int = as_in(RolloutOptions, "max_running_prompts", default=256, unset="")
    max_prompt_tokens: int = as_in(RolloutOptions, "max_prompt_tokens")
    max_new_tokens: int = as_in(RolloutOptions, "max_new_tokens", help="Most tokens of an answer.")
    max_context_len: int | None = as_in(
        RolloutOptions,
        "max_context_len",
        help="Most tokens of prompt and answer together. The model's own limit also holds.",
    )
    temperature: float | None = as_in(
        EvaluationOptions,
        "eval_temperature",
        group="Rollout",
        unset="1.0, greedy for one sample",
        remedy="for the most likely token use --greedy",
        help="Sampling temperature.",
    )
    top_k: int = as_in(RolloutOptions, "top_k")
    top_p: float = as_in(RolloutOptions, "top_p")
    greedy: bool = as_in(RolloutOptions, "greedy")
    stop: tuple[str, ...] = as_in(RolloutOptions, "stop")
    stop_token_ids: tuple[int, ...] = as_in(RolloutOptions, "stop_token_ids")
    ignore_eos: bool = as_in(RolloutOptions, "ignore_eos")
    kv_cache_tokens: int | None = as_in(RolloutOptions, "kv_cache_tokens")
    attn_backend: str = as_in(RolloutOptions, "attn_backend")
    disable_thinking: bool = as_in(RolloutOptions, "disable_thinking")
    reward_fn_path: str | None = as_in(RolloutOptions, "reward_fn_path")
    reward_weights: str | None = as_in(RolloutOptions, "reward_weights")
    reward_ckpt: str | None = as_in(RolloutOptions, "reward_ckpt")
    reward_timeout_s: float = as_in(RolloutOptions, "reward_timeout_s")
    reward_workers: int | None = as_in(RolloutOptions, "reward_workers")
    reward_memory_gb: float | None = as_in(RolloutOptions, "reward_memory_gb")
    on_reward_error: str = as_in(
        RolloutOptions,
        "on_reward_error",
        help="When a reward fails: stop, or leave that sample out of the averages and count it.",
    )
    score_micro_bs: int = as_in(
        UpdateOptions, "score_micro_bs", group="Rollout", help="Answers that a reward model scores at once."
    )

    max_rows: int | None = as_in(EvaluationOptions, "eval_max_rows", help="Use only the first N rows.")
    n_samples: int = as_in(
        EvaluationOptions, "eval_n_samples", help="Answers per prompt; pass@k is reported up to this k."
    )
    output: str | None = option(
        None, group="Evaluation", metavar="FILE.JSONL", unset="not written", help="Write every answer with its reward."
    )
    json: bool = option(False, group="Evaluation", help="Print one line of JSON instead of a table.")

    def as_train_options(self) -> TrainOptions:
        """The same settings as a run has them."""
        names = [entry.name for entry in options_of(EvalOptions) if entry.name not in _OWN]
        values = {_RENAMED.get(name, name): getattr(self, name) for name in names}
        return TrainOptions(**values | ({"ckpt": None} if is_address(self.ckpt) else {}), run_dir="")


def parse_eval(argv: Sequence[str]) -> EvalOptions:
    """Parse and check the arguments of ``areno eval``; run directories become their newest checkpoints."""
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
        yield "--reward-fn-path or --reward-ckpt is required; give --reward-fn-path file.py with reward_fn(record)"
    yield from value_problems(options)
    for name, because in _useless(options):
        if name in options.explicit:
            yield f"{flag_of(name)} {getattr(options, name)} has no effect {because}"
    train = options.as_train_options()
    yield from decoding_problems(train)
    yield from shared_problems(train, TEST)
    if options.output is not None:
        path = Path(options.output).expanduser()
        if not options.output or path.is_dir():
            yield f"--output {options.output!r} is no file name; give one such as samples.jsonl"
        else:
            yield unwritable(path.parent, "--output")


def _useless(options: EvalOptions) -> Iterator[tuple[str, str]]:
    """Options that another one makes idle, and why."""
    if is_address(options.ckpt):
        for name in _OF_MODEL:
            yield name, "on a model behind an address; leave it out"
    else:
        yield "model", "on a model of this machine; it names one of a server, whose address --ckpt takes"
    if options.greedy:
        for name in ("temperature", "top_k", "top_p"):
            yield name, "with --greedy; leave one of the two out"
        if options.n_samples > 1:
            yield "n_samples", "with --greedy, which gives the same answer each time; leave one of the two out"
    elif options.temperature is None and options.n_samples == 1:
        for name in ("top_k", "top_p"):
            yield name, "on a single sample, which is greedy; give --temperature or --n-samples too"
    if options.reward_ckpt:
        yield "reward_fn_path", "with --reward-ckpt, which gives the reward already; leave one of the two out"
        for name in ("reward_weights", "reward_timeout_s", "reward_workers", "reward_memory_gb"):
            yield name, "with --reward-ckpt, which runs no reward function; leave it out"
    else:
        yield "score_micro_bs", "without --reward-ckpt; leave it out"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """All options of ``areno export``."""

    ckpt: str | None = as_in(
        BasicOptions,
        "ckpt",
        help="What to export: the folder of an adapter or of a whole model, a .gguf file, or a run directory, whose newest "
        "checkpoint is taken. Required.",
    )
    output: str | None = option(None, group="Basic", metavar="FOLDER", help="Where to write it. Required.")
    dtype: str = as_in(
        BasicOptions,
        "dtype",
        help="Type of the written weights; auto is that of the base model's files. They are added in float32.",
    )
    gguf: str | None = option(
        None,
        group="Basic",
        choices=("f32", "f16", "bf16", "q8_0"),
        help="Also write the model as model-TYPE.gguf into the folder, for llama.cpp and Ollama, with matrices of this type.",
    )
    trust_remote_code: bool = as_in(BasicOptions, "trust_remote_code")


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
        yield "--output is required; give the folder to write"
        return
    folder = Path(options.output).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        yield f"--output {options.output} is not empty; choose a new folder"
    yield unwritable(folder, "--output")
