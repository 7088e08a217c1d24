"""Checks a run before anything expensive happens: values, combinations, paths. Reports all problems at once.

An option without effect is a problem too. Files are looked at; `areno.config.hooks` imports them next.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.config import hooks
from areno.config.advantages import list_advantages
from areno.config.algorithms import AlgorithmSpec, get_algorithm
from areno.config.effects import without_effect
from areno.config.machine import NO_MPS
from areno.config.options import Option, flag_of, nearest, options_of
from areno.config.packages import missing_packages
from areno.config.parser import Problems, extra_options
from areno.config.paths import adapter_problem, ckpt_problem, dataset_problem, is_adapter, unwritable
from areno.config.policy_loss_options import PolicyLossOptions
from areno.config.resume import value_of
from areno.config.reward_weights import part_weights
from areno.config.splits import TEST, TRAIN, split_problem
from areno.config.tracking import SERVICES, mode_of, service_problem
from areno.config.train_options import TrainOptions
from areno.errors import UsageError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import is_run


def validate(options: TrainOptions, *, needs_data: bool = True) -> None:
    """Check that parsed options, merged with the resumed run if there is one, make a run that can work and learn.

    ``needs_data`` is False for planning, which reads neither data nor rewards. A `UsageError` has every problem with its
    option, value and remedy.
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
        yield "--ckpt is required; give a model folder or a repo id such as Qwen/Qwen3-0.6B"
    if needs_data:
        yield from _required(options, spec)
    for entry in entries:
        yield value_problem(entry, value_of(options, entry.name))
    if spec is not None:
        yield from _of_algorithm(options, spec, entries)
    yield from shared_problems(options)
    for service in options.track:
        if service not in SERVICES:
            yield f"--track {service} is unknown{nearest(service, SERVICES)}; choose {', '.join(SERVICES)}"
        elif problem := service_problem(service, mode_of(service)):
            yield f"--track {service} {problem}"
    yield from _output_paths(options)


def _of_algorithm(options: TrainOptions, spec: AlgorithmSpec, entries: Sequence[Option]) -> Iterator[str]:
    idle = without_effect(options, spec)
    for entry in entries:
        if entry.name in idle and entry.name in options.explicit:
            yield f"{_spelled(entry, value_of(options, entry.name))} {idle[entry.name]}"
    yield from _knobs(options, spec)
    if spec.learns_from_pairs and options.mini_bs % 2:
        yield (
            f"--mini-bs {options.mini_bs} would part a pair: --algo {spec.name} trains on chosen and rejected rows "
            f"together, two rows a pair; give an even number such as {options.mini_bs + 1}"
        )
    if options.uses_lora:
        yield from _adapter(options, spec)
    if spec.requires_rollout:
        yield from _samples(options, spec)
        yield from decoding_problems(options)
        yield from _updates(options)
        yield _warm_up(options, spec, options.max_steps, f"--max-steps {options.max_steps}")
        if options.agent_fn is not None:
            yield hooks.hook_file_problem(options.agent_fn, hooks.AGENT_HOOK)
            if missing := missing_packages("serve"):
                yield f"--agent-fn {options.agent_fn}: agents are served over HTTP, which needs {missing}"
        if options.workflow is not None:
            yield from _workflow(options, options.workflow)
        if options.uses_replicas:
            yield from _replicas(options)


def shared_problems(options: TrainOptions, split: str = TRAIN) -> Iterator[str]:
    """Problems of combinations and input paths, as training and ``areno eval`` check them alike; ``split`` is what is read."""
    yield from _combinations(options)
    yield from _paths(options, split)
    try:
        part_weights(options.reward_weights)
    except UsageError as error:
        yield f"--reward-weights {options.reward_weights!r}: {error}"


def _required(options: TrainOptions, spec: AlgorithmSpec | None) -> Iterator[str]:
    """Data, and what turns it into something to learn from."""
    if not options.dataset_path:
        yield "--dataset-path is required; give a data file, a folder or a hub reference such as gsm8k:main"
    if spec is None:
        return
    if spec.name == "sft" and not options.dataset_loader_fn:
        yield (
            "--dataset-loader-fn is required for --algo sft; give file.py with load_training_dataset, "
            "which makes rows of prompt and response"
        )
    if spec.requires_rollout and not (options.reward_fn_path or options.reward_ckpt or options.workflow):
        yield (
            f"--reward-fn-path or --reward-ckpt is required for --algo {spec.name}; "
            "give --reward-fn-path file.py with reward_fn(record), or a reward model that `--algo rm` has trained"
        )
    if options.reward_fn_path and options.reward_ckpt:
        yield (
            f"--reward-fn-path {options.reward_fn_path} and --reward-ckpt {options.reward_ckpt} both give the reward; "
            "leave one of the two out"
        )


def value_problems(options: Any) -> Iterator[str]:
    """What is wrong with single values of a dataclass of options."""
    declaration: type = type(options)
    for entry in options_of(declaration):
        yield value_problem(entry, getattr(options, entry.name))


def value_problem(entry: Option, value: Any) -> str:
    """Say what is wrong with the value of one option, whatever the others are; empty if nothing is."""
    values = value if entry.many else (value,)
    for one in values:
        if one is None or entry.kind is bool:
            continue
        if entry.kind is str:
            if entry.info.choices and one not in entry.info.choices:
                return f"{entry.flag} {one!r} is unknown; choose {', '.join(entry.info.choices)}"
            if entry.many and not one:
                return f"{entry.flag} must not be empty; give the text to look for, or leave it out"
        elif problem := entry.number_problem(one, entry.flag):
            return problem
    return ""


def _knobs(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    """What the dataclass of the algorithm's own options refuses."""
    if any(value_problem(entry, value_of(options, entry.name)) for entry in spec.own_options()):
        return
    try:
        knobs = spec.knobs(options)
    except ValueError as error:
        yield f"--algo {spec.name}: {error}"
        return
    if isinstance(knobs, PolicyLossOptions) and knobs.use_decoupled_loss and not knobs.needs_proximal:
        yield (
            f"--prox-logp-method {knobs.prox_logp_method} interpolates between versions of the weights, which only areno run "
            "gives to a loss; use recompute"
        )


def _spelled(entry: Option, value: Any) -> str:
    if entry.kind is bool:
        return entry.flag if value else "--no-" + entry.flag.removeprefix("--")
    return f"{entry.flag} {' '.join(map(str, value)) if entry.many else value}"


def _samples(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    compares_prompts = options.advantage == "batch" and options.batch_size > 1
    if 1 <= options.n_samples < spec.min_samples and not compares_prompts:
        yield (
            f"--n-samples {options.n_samples}: {spec.name} compares the samples of a prompt, so the advantage would "
            f"always be 0; give at least {spec.min_samples}"
        )
    if options.greedy and options.n_samples > 1:
        yield (
            f"--greedy with --n-samples {options.n_samples}: all samples of a prompt would be equal, with nothing to "
            "learn from; leave --greedy out"
        )


def decoding_problems(options: TrainOptions) -> Iterator[str]:
    """Say what is wrong with how answers are to be generated."""
    if options.top_k == 0:
        yield "--top-k must be positive, or -1 for no limit, got 0; give -1 or at least 1"
    longest = options.max_prompt_tokens + options.max_new_tokens
    if options.kv_cache_tokens is not None and 0 < options.kv_cache_tokens < longest:
        yield (
            f"--kv-cache-tokens {options.kv_cache_tokens} is less than one sequence may need (--max-prompt-tokens "
            f"{options.max_prompt_tokens} + --max-new-tokens {options.max_new_tokens}); give at least {longest}"
        )


def _adapter(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[str]:
    if missing := missing_packages("qlora" if options.load_in_4bit else "lora"):
        yield f"{'--load-in-4bit' if options.load_in_4bit else '--lora-rank'} needs {missing}"
    if options.load_in_4bit and options.tp_size > 1:
        yield (
            f"--load-in-4bit with --tp-size {options.tp_size}: weights in 4 bits cannot be spread over ranks; leave one of the "
            "two out: --world-size N alone keeps the model whole on each device"
        )
    if options.lora_dropout > 0 and spec.requires_rollout:
        yield (
            f"--lora-dropout {options.lora_dropout}: a rollout of {spec.name} drops nothing, so that the importance ratio "
            "of a policy with dropout would be noise; leave it out"
        )
    if options.lora_adapter_path is not None:
        yield adapter_problem(options.lora_adapter_path, "--lora-adapter-path")
    if options.ckpt and is_adapter(options.ckpt):
        yield (
            f"--ckpt {options.ckpt} is an adapter, and a new one would have no model to belong to; give its base model "
            f"there and --lora-adapter-path {options.ckpt}, or merge it first with areno export"
        )


def _updates(options: TrainOptions) -> Iterator[str]:
    if options.update_minibatches > options.batch_size:
        yield (
            f"--update-minibatches {options.update_minibatches} is more than the --batch-size {options.batch_size} "
            f"prompts of a step; give at most {options.batch_size}"
        )
    if options.update_minibatches > 1 and options.gradient_accumulation_steps is not None:
        yield (
            f"--update-minibatches {options.update_minibatches} and --gradient-accumulation-steps "
            f"{options.gradient_accumulation_steps} both cut a step into updates; leave one of the two out"
        )
    known = list_advantages()
    if options.advantage not in known:
        if ".py" in options.advantage:
            yield hooks.hook_file_problem(options.advantage, hooks.ADVANTAGE_HOOK)
        else:
            yield (
                f"--advantage {options.advantage!r} is unknown{nearest(options.advantage, known)}; choose "
                f"{', '.join(known)}, or give a function of your own as file.py:function"
            )


def check_length(options: TrainOptions, rows: int) -> None:
    """Check that a run over so many data rows does not end in the critic's warm-up."""
    steps = -(-rows // options.batch_size) * options.epochs
    length = f"--epochs {options.epochs} over {rows} rows in batches of {options.batch_size} (--batch-size)"
    if text := _warm_up(options, get_algorithm(options.algo), steps, length):
        raise UsageError(text)


def _warm_up(options: TrainOptions, spec: AlgorithmSpec, steps: int | None, length: str) -> str:
    warm_up = options.critic_warmup_steps
    if steps is None or steps > warm_up or not (spec.name == "ppo" or "critic_warmup_steps" in spec.uses):
        return ""
    return (
        f"--critic-warmup-steps {warm_up} trains the critic alone for the first {warm_up} steps, and {length} ends the run "
        f"by then, so the policy would never be trained; give a run of more than {warm_up} steps, or fewer warm-up steps"
    )


def _combinations(options: TrainOptions) -> Iterator[str]:
    if options.tp_size > 0 and options.world_size % options.tp_size:
        yield (
            f"--world-size must be divisible by --tp-size, got {options.world_size} and {options.tp_size}; "
            f"give --tp-size 1 or a divisor of {options.world_size}"
        )
    if options.speculate and options.tp_size > 1:
        yield (
            f"--speculate {options.speculate} with --tp-size {options.tp_size}: only replicas of one rank guess ahead; leave "
            "one of the two out"
        )
    if options.fsdp:
        yield from _fsdp(options)
    if options.lr_decay_style != "constant" and options.min_lr > options.lr:
        yield (
            f"--min-lr {options.min_lr} is above --lr {options.lr}, so the rate would rise; "
            f"give --min-lr {options.lr / 10:g} or --lr-decay-style constant"
        )
    if options.device == "mps":
        yield f"--device mps: {NO_MPS}; use --device cpu"
    elif not re.fullmatch(r"auto|cpu|cuda(:\d+)?", options.device):
        yield f"--device {options.device!r} is unknown; choose auto, cpu, cuda, or cuda:N for one of several"


def _fsdp(options: TrainOptions) -> Iterator[str]:
    if options.world_size == options.tp_size:
        tensor = f", --tp-size {options.tp_size}" if options.tp_size > 1 else ""
        yield (
            f"--fsdp with --world-size {options.world_size}{tensor}: there is one replica, so no other to shard weights with; "
            f"give --world-size {2 * options.world_size} or more, or --no-fsdp"
        )
    if options.load_in_4bit:
        yield "--fsdp with --load-in-4bit: weights in 4 bits are not sharded; leave one of the two out"
    if options.uses_lora and options.tp_size > 1:
        yield "--fsdp with --lora-rank and --tp-size: adapters of layers that ranks cut are not sharded; use --tp-size 1"
    if options.tune_params:
        yield "--fsdp with --tune-params: the memory of spread weights is not planned yet; give the sizes, or --no-fsdp"


def _workflow(options: TrainOptions, workflow: str) -> Iterator[str]:
    if ":" not in workflow:
        yield f"--workflow {workflow}: name the class or object too, as file.py:NAME"
    elif ".py" in workflow:
        yield hooks.hook_file_problem(workflow, hooks.WORKFLOW_HOOK)
    if options.agent_fn is not None:
        yield (
            f"--workflow {workflow} and --agent-fn {options.agent_fn} both do the prompts' tasks; leave one of the two out"
        )


def _replicas(options: TrainOptions) -> Iterator[str]:
    """What rollout processes do not go together with."""
    for name in ("rollout_server_command", "rollout_server_args"):
        try:
            shlex.split(getattr(options, name) or "")
        except ValueError as error:
            yield f"{flag_of(name)} {getattr(options, name)!r} is no command line: {error}; close its quotes"
    given = "--rollout async" if options.rollout == "async" else f"--rollout-backend {options.rollout_backend}"
    if options.rollout_url and len(options.rollout_url) != options.rollout_replicas:
        yield (
            f"--rollout-url is given {len(options.rollout_url)} times, and --rollout-replicas is {options.rollout_replicas}; "
            "give one address per replica"
        )
    if options.agent_fn is not None:
        yield (
            f"{given} with --agent-fn {options.agent_fn}: its agents talk to the model of this process; give an agent "
            f"with `async def run(self, data, **extra)` as --workflow, or leave {given} out"
        )
    if options.load_in_4bit:
        yield f"{given} with --load-in-4bit: rollout processes hold whole weights only; leave one of the two out"
    if options.tune_params:
        yield (
            f"{given} with --tune-params: the memory of rollout processes is not planned; give the sizes, or leave "
            f"{given} out"
        )


def _paths(options: TrainOptions, split: str) -> Iterator[str]:
    for name in ("ckpt", "ref_ckpt", "critic_ckpt", "reward_ckpt"):
        if place := getattr(options, name):
            yield ckpt_problem(place, flag_of(name))
    loader, held_out_loader = options.dataset_loader_fn, options.eval_dataset_loader_fn
    if options.dataset_path:
        yield _rows_problem(options.dataset_path, loader, "--dataset-path", split)
    if options.eval_dataset_path:
        yield _rows_problem(options.eval_dataset_path, held_out_loader or loader, "--eval-dataset-path", TEST)
    named = (
        (loader, hooks.LOADER_HOOK),
        (held_out_loader, hooks.EVAL_LOADER_HOOK),
        (options.reward_fn_path, hooks.REWARD_HOOK),
    )
    for function, hook in named:
        if function is not None:
            yield hooks.hook_file_problem(function, hook)


def _rows_problem(place: str, loader: str | None, option: str, split: str) -> str:
    problem = dataset_problem(place, has_loader=bool(loader), option=option)
    return problem or ("" if loader else split_problem(place, split, option))


def _output_paths(options: TrainOptions) -> Iterator[str]:
    for name in ("run_dir", "save_path", "metrics_log_dir"):
        place = getattr(options, name)
        if place == "":
            yield f"{flag_of(name)} must not be empty; give a directory, or leave it out"
        elif place is not None:
            yield unwritable(Path(place), flag_of(name))
    if options.resume is not None:
        return
    if options.run_dir and is_run(Path(options.run_dir)):
        place = options.run_dir
        yield f"--run-dir {place} already holds a run; choose another, or continue it with --resume {place}"
    if options.metrics_log_dir and any(Path(options.metrics_log_dir).glob("events.out.tfevents.*")):
        yield (
            f"--metrics-log-dir {options.metrics_log_dir} already holds the events of another run, which TensorBoard would "
            "show as one with this; choose an empty directory"
        )
    if options.save_path and CheckpointFolder(options.save_path).steps():
        yield (
            f"--save-path {options.save_path} already holds checkpoints of another run; choose an empty directory, "
            "or continue that run with --resume"
        )
