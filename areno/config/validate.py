"""Validates the options of a run before any expensive work: values, combinations and paths. All problems are reported at once.

An option without effect is also a problem. This module does not import hook files; `areno.config.hooks` imports them.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.config import hooks
from areno.config.advantages import list_advantages
from areno.config.algorithms import AlgorithmSpec, get_algorithm
from areno.config.all_train_options import OUTPUT_DIRECTORIES, TrainOptions
from areno.config.effects import without_effect
from areno.config.machine import NO_MPS, tensor_parallel_problem
from areno.config.options import Option, flag_of, nearest, options_of
from areno.config.packages import missing_packages
from areno.config.parser import Problems, extra_options
from areno.config.paths import adapter_problem, ckpt_problem, dataset_problem, is_adapter, unwritable
from areno.config.policy_loss_options import PolicyLossOptions
from areno.config.resume import value_of
from areno.config.reward_weights import part_weights
from areno.config.saved_rollouts import kept_rollouts
from areno.config.splits import TEST, TRAIN, split_problem
from areno.config.tracking import SERVICES, mode_of, service_problem
from areno.errors import UsageError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import is_run


def validate(options: TrainOptions, *, needs_data: bool = True) -> None:
    """Check the options of a run. Raises UsageError with all problems and remedies.

    ``needs_data`` is False for ``areno plan`` and ``areno replay``, which need neither a dataset nor a reward function.
    """
    Problems.raise_all(_problems(options, needs_data))


def _problems(options: TrainOptions, needs_data: bool) -> Iterator[str]:
    spec: AlgorithmSpec | None = None
    entries = options_of(TrainOptions)
    try:
        spec = get_algorithm(options.algo)
        entries += extra_options(spec)
    except UsageError as error:
        yield str(error)
    if not options.ckpt:
        yield "--ckpt is required; pass a model folder or a repo id such as Qwen/Qwen3-0.6B"
    if needs_data:
        yield from _required(options, spec)
    for entry in entries:
        yield entry.value_problem(value_of(options, entry.name), entry.flag)
    if spec is not None:
        yield from _of_algorithm(options, spec, entries)
    yield from shared_problems(options)
    try:
        kept_rollouts(options.save_rollouts)
    except UsageError as error:
        yield f"--save-rollouts {error}"
    for service in options.track:
        if service not in SERVICES:
            yield f"--track {service} is unknown{nearest(service, SERVICES)}; choose {', '.join(SERVICES)}"
        elif problem := service_problem(service, mode_of(service)):
            yield f"--track {service} {problem}"
    yield from _output_paths(options)


def _of_algorithm(options: TrainOptions, spec: AlgorithmSpec, entries: Sequence[Option]) -> Iterator[str]:
    unused = without_effect(options, spec)
    for entry in entries:
        if entry.name in unused and entry.name in options.explicit:
            yield f"{as_argument(entry, value_of(options, entry.name))} {unused[entry.name]}"
    yield from _algorithm_options(options, spec)
    if spec.learns_from_pairs and options.mini_bs % 2:
        yield (
            f"--mini-bs {options.mini_bs} would split a pair: --algo {spec.name} trains on pairs of a chosen and a rejected "
            f"row; use an even number such as {options.mini_bs + 1}"
        )
    if options.uses_lora:
        yield from _adapter(options, spec)
    if spec.requires_rollout:
        yield from _samples(options, spec)
        yield from decoding_problems(options)
        yield from _updates(options)
        yield _warmup_problem(options, spec, options.max_steps, f"--max-steps {options.max_steps}")
        if options.agent_fn is not None:
            yield hooks.hook_file_problem(options.agent_fn, hooks.AGENT_HOOK)
            if missing := missing_packages("serve"):
                yield f"--agent-fn {options.agent_fn}: agents use the model over HTTP, which needs {missing}"
        if options.workflow is not None:
            yield from _workflow(options, options.workflow)
        if options.uses_replicas:
            yield from _replicas(options)


def shared_problems(options: TrainOptions, split: str = TRAIN) -> Iterator[str]:
    """Yield messages about invalid option combinations and invalid input paths. Several commands use these checks.

    ``split`` is the split that is read from the dataset.
    """
    yield from _combinations(options)
    yield from _paths(options, split)
    try:
        part_weights(options.reward_weights)
    except UsageError as error:
        yield f"--reward-weights {options.reward_weights!r}: {error}"


def _required(options: TrainOptions, spec: AlgorithmSpec | None) -> Iterator[str]:
    if not options.dataset_path:
        yield "--dataset-path is required; pass a data file, a folder or a hub reference such as gsm8k:main"
    if spec is None:
        return
    if spec.name == "sft" and not options.dataset_loader_fn:
        yield (
            "--dataset-loader-fn is required for --algo sft; pass a file.py with load_training_dataset, "
            "which returns rows with the keys prompt and response"
        )
    if spec.requires_rollout and not (options.reward_fn_path or options.reward_ckpt or options.workflow):
        yield (
            f"--reward-fn-path or --reward-ckpt is required for --algo {spec.name}; "
            "pass a file that defines reward_fn(record) as --reward-fn-path, or a reward model (trained with `--algo rm`) as "
            "--reward-ckpt"
        )
    if options.reward_fn_path and options.reward_ckpt:
        yield (
            f"--reward-fn-path {options.reward_fn_path} and --reward-ckpt {options.reward_ckpt} both define the reward; "
            "use only one of them"
        )


def value_problems(options: Any) -> Iterator[str]:
    """Yield a problem for each option that has an invalid value. Combinations of options are not checked."""
    declaration: type = type(options)
    for entry in options_of(declaration):
        yield entry.value_problem(getattr(options, entry.name), entry.flag)


def _algorithm_options(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    if any(entry.value_problem(value_of(options, entry.name), entry.flag) for entry in spec.own_options()):
        return
    try:
        knobs = spec.knobs(options)
    except ValueError as error:
        yield f"--algo {spec.name}: {error}"
        return
    if isinstance(knobs, PolicyLossOptions) and knobs.use_decoupled_loss and knobs.prox_logp_method != "recompute":
        yield (
            f"--prox-logp-method {knobs.prox_logp_method} needs the weight version of each token, which only "
            "`areno run` passes to a loss; use recompute"
        )


def as_argument(entry: Option, value: Any) -> str:
    """Format an option and its value as command-line arguments, such as ``--batch-size 32``."""
    if entry.kind is bool:
        return entry.flag if value else "--no-" + entry.flag.removeprefix("--")
    return " ".join(f"{entry.flag} {item}" for item in (value if entry.many else (value,)))


def _samples(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    compares_prompts = options.advantage == "batch" and options.batch_size > 1
    if 1 <= options.n_samples < spec.min_samples and not compares_prompts:
        yield (
            f"--n-samples {options.n_samples}: {spec.name} compares the samples of a prompt, so the advantage would "
            f"always be 0; use at least {spec.min_samples}"
        )
    if options.greedy and options.n_samples > 1:
        yield (
            f"--greedy with --n-samples {options.n_samples}: all samples of a prompt would be identical, so there would be "
            "nothing to compare; remove --greedy"
        )


def decoding_problems(options: TrainOptions) -> Iterator[str]:
    """Yield the problems with the generation options."""
    if options.top_k == 0:
        yield "--top-k must be -1 (no limit) or at least 1, got 0; use -1 or at least 1"
    longest = options.max_prompt_tokens + options.max_new_tokens
    limits = f"--max-prompt-tokens {options.max_prompt_tokens} + --max-new-tokens {options.max_new_tokens}"
    if options.max_context_len is not None and options.max_context_len < longest:
        longest, limits = options.max_context_len, f"--max-context-len {options.max_context_len}"
    if options.kv_cache_tokens is not None and 0 < options.kv_cache_tokens < longest:
        yield (
            f"--kv-cache-tokens {options.kv_cache_tokens} is too small for one sequence ({limits}); use at least {longest}"
        )


def _adapter(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    if missing := missing_packages("qlora" if options.load_in_4bit else "lora"):
        yield f"{'--load-in-4bit' if options.load_in_4bit else '--lora-rank'} needs {missing}"
    if options.load_in_4bit and options.tp_size > 1:
        yield (
            f"--load-in-4bit with --tp-size {options.tp_size}: 4-bit weights cannot be sharded; remove --load-in-4bit, or "
            "remove --tp-size, so that each device has a full copy of the model"
        )
    if options.lora_dropout > 0 and spec.requires_rollout:
        yield (
            f"--lora-dropout {options.lora_dropout}: rollouts of {spec.name} have no dropout, so the importance ratio would "
            "be noisy; remove the option"
        )
    if options.lora_adapter_path is not None:
        yield adapter_problem(options.lora_adapter_path, "--lora-adapter-path")
    if options.ckpt and is_adapter(options.ckpt):
        yield (
            f"--ckpt {options.ckpt} is an adapter, not a model; pass its base model as --ckpt and the adapter as "
            f"--lora-adapter-path {options.ckpt}, or first merge the adapter with `areno export`"
        )


def _updates(options: TrainOptions) -> Iterator[str]:
    if options.update_minibatches > options.batch_size:
        yield (
            f"--update-minibatches {options.update_minibatches} is more than the {options.batch_size} prompts of a step "
            f"(--batch-size); use at most {options.batch_size}"
        )
    if options.update_minibatches > 1 and options.gradient_accumulation_steps is not None:
        yield (
            f"--update-minibatches {options.update_minibatches} and --gradient-accumulation-steps "
            f"{options.gradient_accumulation_steps} both set the number of rows per optimizer step; use only one of them"
        )
    names = list_advantages()
    if options.advantage not in names:
        if ".py" in options.advantage:
            yield hooks.hook_file_problem(options.advantage, hooks.ADVANTAGE_HOOK)
        else:
            yield (
                f"--advantage {options.advantage!r} is unknown{nearest(options.advantage, names)}; choose "
                f"{', '.join(names)}, or pass your own function as file.py:function"
            )


def check_length(options: TrainOptions, rows: int) -> None:
    """Raise UsageError if a run over ``rows`` data rows would end during the critic's warmup."""
    steps = -(-rows // options.batch_size) * options.epochs
    length = f"--epochs {options.epochs} over {rows} rows in batches of {options.batch_size} (--batch-size)"
    if text := _warmup_problem(options, get_algorithm(options.algo), steps, length):
        raise UsageError(text)


def _warmup_problem(options: TrainOptions, spec: AlgorithmSpec, steps: int | None, length: str) -> str:
    warmup = options.critic_warmup_steps
    if steps is None or steps > warmup or not (spec.name == "ppo" or "critic_warmup_steps" in spec.uses):
        return ""
    return (
        f"--critic-warmup-steps {warmup}: only the critic is trained in the first {warmup} steps, but the number of steps of "
        f"the run is {steps} ({length}), so the policy would never be trained; train for more than {warmup} steps, or use "
        "fewer warmup steps"
    )


def _combinations(options: TrainOptions) -> Iterator[str]:
    if options.tp_size > 0 and options.world_size % options.tp_size:
        yield (
            f"--world-size must be divisible by --tp-size, got {options.world_size} and {options.tp_size}; "
            f"use --tp-size 1 or a divisor of {options.world_size}"
        )
    if options.tp_size > 1 and (problem_and_remedy := tensor_parallel_problem(options.fsdp)):
        yield f"--tp-size {options.tp_size}: {problem_and_remedy}, or use --tp-size 1"
    if options.speculate and options.tp_size > 1:
        yield (
            f"--speculate {options.speculate} with --tp-size {options.tp_size}: speculative decoding does not support "
            "tensor parallelism; use only one of them"
        )
    if options.fsdp:
        yield from _fsdp(options)
    if options.lr_decay_style != "constant" and options.min_lr > options.lr:
        yield (
            f"--min-lr {options.min_lr} is above --lr {options.lr}, so the learning rate would rise; "
            f"use --min-lr {options.lr / 10:g} or --lr-decay-style constant"
        )
    if options.device == "mps":
        yield f"--device mps: {NO_MPS}; use --device cpu"
    elif not re.fullmatch(r"auto|cpu|cuda(:\d+)?", options.device):
        yield f"--device {options.device!r} is unknown; choose auto, cpu, cuda, or cuda:N"


def _fsdp(options: TrainOptions) -> Iterator[str]:
    if options.world_size == options.tp_size:
        tensor = f", --tp-size {options.tp_size}" if options.tp_size > 1 else ""
        yield (
            f"--fsdp with --world-size {options.world_size}{tensor}: FSDP shards weights across data-parallel ranks "
            f"and needs at least two; use --world-size {2 * options.world_size} or more, or --no-fsdp"
        )
    if options.load_in_4bit:
        yield "--fsdp with --load-in-4bit: 4-bit weights cannot be sharded; use only one of them"
    if options.uses_lora and options.tp_size > 1:
        yield "--fsdp with --lora-rank and --tp-size: areno cannot shard adapters of tensor-parallel layers; use --tp-size 1"
    if options.tune_params:
        yield (
            "--fsdp with --tune-params: tuning does not support FSDP; remove --tune-params and set the batch sizes yourself, "
            "or use --no-fsdp"
        )


def _workflow(options: TrainOptions, workflow: str) -> Iterator[str]:
    if ":" not in workflow:
        yield f"--workflow {workflow} names no class or object; add the name, as in file.py:NAME"
    elif hooks.is_file_spec(workflow):
        yield hooks.hook_file_problem(workflow, hooks.WORKFLOW_HOOK)
    if options.agent_fn is not None:
        yield (f"--workflow {workflow} and --agent-fn {options.agent_fn} are mutually exclusive; use only one of them")


def _replicas(options: TrainOptions) -> Iterator[str]:
    for name in ("rollout_server_command", "rollout_server_args"):
        try:
            shlex.split(getattr(options, name) or "")
        except ValueError as error:
            yield f"{flag_of(name)} {getattr(options, name)!r} is not a valid command line: {error}; check its quotes"
    flag = "--rollout async" if options.rollout == "async" else f"--rollout-backend {options.rollout_backend}"
    if options.rollout_url and len(options.rollout_url) != options.rollout_replicas:
        yield (
            f"--rollout-url is set {len(options.rollout_url)} times, but --rollout-replicas is "
            f"{options.rollout_replicas}; pass one address per replica"
        )
    if options.agent_fn is not None:
        yield (
            f"{flag} with --agent-fn {options.agent_fn}: this agent can only use the model in this process; replace "
            "--agent-fn by --workflow, and pass an agent with `async def run(self, data, **extra)`, or remove "
            f"{flag}"
        )
    if options.load_in_4bit:
        yield f"{flag} with --load-in-4bit: rollout processes cannot use 4-bit weights; use only one of them"
    if options.tune_params:
        yield (
            f"{flag} with --tune-params: tuning ignores the memory of rollout processes; remove --tune-params and "
            f"set the batch sizes yourself, or remove {flag}"
        )


def _paths(options: TrainOptions, split: str) -> Iterator[str]:
    for name in ("ckpt", "ref_ckpt", "critic_ckpt", "reward_ckpt"):
        if ckpt := getattr(options, name):
            yield ckpt_problem(ckpt, flag_of(name))
    loader, held_out_loader = options.dataset_loader_fn, options.eval_dataset_loader_fn
    if options.dataset_path:
        yield _rows_problem(options.dataset_path, loader, "--dataset-path", split)
    if options.eval_dataset_path:
        yield _rows_problem(options.eval_dataset_path, held_out_loader or loader, "--eval-dataset-path", TEST)
    hook_files = (
        (loader, hooks.LOADER_HOOK),
        (held_out_loader, hooks.EVAL_LOADER_HOOK),
        (options.reward_fn_path, hooks.REWARD_HOOK),
    )
    for function, hook in hook_files:
        if function is not None:
            yield hooks.hook_file_problem(function, hook)


def _rows_problem(reference: str, loader: str | None, option: str, split: str) -> str:
    problem = dataset_problem(reference, has_loader=bool(loader), option=option)
    return problem or ("" if loader else split_problem(reference, split, option))


def _output_paths(options: TrainOptions) -> Iterator[str]:
    for name in OUTPUT_DIRECTORIES:
        directory = getattr(options, name)
        if directory == "":
            yield f"{flag_of(name)} must not be empty; pass a directory, or omit the option"
        elif directory is not None:
            yield unwritable(Path(directory), flag_of(name))
    if options.resume is not None:
        return
    if options.run_dir and is_run(Path(options.run_dir)):
        run = options.run_dir
        yield f"--run-dir {run} already contains a run; choose another directory, or continue that run with --resume {run}"
    if options.metrics_log_dir and any(Path(options.metrics_log_dir).glob("events.out.tfevents.*")):
        yield (
            f"--metrics-log-dir {options.metrics_log_dir} already contains the events of another run, which TensorBoard would "
            "merge with this run's events; choose an empty directory"
        )
    if options.save_path and CheckpointFolder(options.save_path).steps():
        yield (
            f"--save-path {options.save_path} already contains checkpoints of another run; choose an empty directory, "
            "or continue that run with --resume"
        )
