"""Which options have no effect in a given run, and why: an explicit one is an error, and none is stored."""

from collections.abc import Iterator, Sequence

from areno.config.algorithms import AlgorithmSpec
from areno.config.options import flag_of, options_of
from areno.config.run_options import EvaluationOptions
from areno.config.train_options import TrainOptions

AGENT_OPTIONS = (
    "agent_timeout_s",
    "agent_retries",
    "agent_max_failures",
    "train_tool_results",
    "turn_discount",
)
"""Options that only agentic rollout reads."""


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def without_effect(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    """Return the options that this run would not read, each with the reason and the remedy."""
    reasons = {}
    for entry in options_of(TrainOptions):
        info = entry.info
        if not spec.reads(entry):
            reasons[entry.name] = f"applies to --algo {listed(info.algorithms)} only, not to {spec.name}; leave it out"
        elif info.rollout_only and not spec.requires_rollout:
            reasons[entry.name] = (
                f"has no effect with --algo {spec.name}, which generates nothing; leave it out, or use one that does, such "
                "as gspo"
            )
    for name, because in _combinations(options, spec):
        reasons.setdefault(name, because)
    return reasons


def _combinations(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[tuple[str, str]]:
    """Options that another option's value makes idle."""
    with_other = "has no effect with {}; leave one of the two out".format
    if options.greedy:
        yield from ((name, with_other("--greedy")) for name in ("temperature", "top_k", "top_p"))
    if options.lr_decay_style == "constant":
        yield from ((name, with_other("--lr-decay-style constant")) for name in ("min_lr", "lr_decay_steps"))
    if options.critic_lr_decay_style == "constant":
        for name in ("critic_min_lr", "critic_lr_decay_steps"):
            yield name, "has no effect without --critic-lr-decay-style linear or cosine; give that too"
    yield from _adapter(options)
    if not options.eval_dataset_path:
        for name in (*(e.name for e in options_of(EvaluationOptions) if e.name != "eval_dataset_path"), "keep_best"):
            yield name, "has no effect without held-out rows; give --eval-dataset-path too"
    if options.model_save_interval is None:
        yield "save_async", "has no effect on checkpoints; give --model-save-interval too"
    if not options.track:
        yield "track_project", "has no effect without a service; give --track too"
    if spec.requires_rollout and not options.agent_fn:
        for name in AGENT_OPTIONS:
            if not (options.workflow and name == "agent_max_failures"):
                yield name, "has no effect without an agent; give --agent-fn too"
    yield from _memory(options)
    if spec.requires_rollout:
        yield from _reference(options, spec)
        yield from _rewards(options)
        if options.rollout == "sync":
            yield "max_staleness", "has no effect without rollout processes; give --rollout async too"
        if not options.uses_replicas:
            yield "rollout_replicas", "has no effect without rollout processes; give --rollout async too"
        servers = ("rollout_url", "rollout_server_command", "rollout_server_args")
        for name in servers if options.rollout_backend == "areno" else ():
            yield name, "has no effect on areno's own engine; give --rollout-backend vllm or sglang too"
        if options.rollout_backend != "areno":
            yield "return_routed_experts", "has no effect on servers, whose routing areno does not read; leave it out"
        if options.rollout_url:
            for name in servers[1:]:
                yield name, "has no effect on servers that run already; leave it out"


def _rewards(options: TrainOptions) -> Iterator[tuple[str, str]]:
    """Options of reward functions, where none runs."""
    of_parts = ("reward_weights", "reward_normalize_parts")
    of_functions = (*of_parts, "reward_timeout_s", "reward_workers", "reward_memory_gb")
    if options.workflow is not None:
        for name in ("reward_fn_path", "reward_ckpt", "on_reward_error", *of_functions):
            yield name, "has no effect with --workflow, which gives the rewards itself; leave one of the two out"
    elif options.reward_ckpt and not options.reward_fn_path:
        for name in of_functions:
            yield name, "has no effect with --reward-ckpt, which runs no reward function; leave it out"
    if options.turn_discount is not None:
        because = "which compares turns by one number each; leave one of the two out"
        yield "reward_normalize_parts", f"has no effect with --turn-discount, {because}"


def _adapter(options: TrainOptions) -> Iterator[tuple[str, str]]:
    """Without an adapter nothing of it matters; one that exists brings its shape."""
    if not options.uses_lora:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit"):
            yield name, "has no effect without an adapter; give --lora-rank too"
    if options.lora_adapter_path is not None:
        for name in ("lora_rank", "lora_alpha", "lora_target_modules"):
            yield (
                name,
                "has no effect with --lora-adapter-path, whose adapter_config.json says it; leave one of the two out",
            )


TUNED_OPTIONS = ("max_running_prompts", "batch_size", "mini_bs")
"""What ``--tune-params`` fills in."""


def _memory(options: TrainOptions) -> Iterator[tuple[str, str]]:
    """Tuning that has nothing to choose, and offloading from where everything is anyway."""
    if not options.tune_params:
        for name in ("mem_frac", "tune_max_samples"):
            yield name, "has no effect without tuning; give --tune-params too"
    elif options.resume is not None:
        for name in ("tune_params", "mem_frac", "tune_max_samples"):
            yield name, "has no effect with --resume, because a run keeps its sizes; leave it out"
    elif options.explicit.issuperset(TUNED_OPTIONS):
        flags = listed([flag_of(name) for name in TUNED_OPTIONS])
        yield "tune_params", f"has nothing to choose, because {flags} are all given; leave one of them out"
    if not options.activation_checkpointing:
        yield (
            "offload_activations",
            "has no effect with --no-activation-checkpointing, which leaves nothing to offload; leave one of the two out",
        )
    for name, what in (("offload_optimizer", "the optimizer"), ("offload_activations", "activations")):
        if options.device == "cpu" and getattr(options, name):
            yield name, f"has no effect on a CPU, whose memory holds {what} anyway; leave it out"


def _reference(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[tuple[str, str]]:
    """Without a KL term no reference is loaded."""
    ppo = spec.name == "ppo" or "use_kl_loss" in spec.uses
    if options.kl_reward_coef == 0:
        yield "kl_reward_type", "has no effect without a KL penalty; give --kl-reward-coef too"
    if options.use_kl_loss if ppo else options.kl_coef > 0:
        return
    because = "has no effect with --no-use-kl-loss" if ppo else "has no effect without a KL term; give --kl-coef too"
    for name in ("kl_loss_type", "kl_loss_coef"):
        yield name, because
    if options.takes_reference(ppo):
        return
    yield "ref_ckpt", because
    if not ppo and not options.reward_ckpt and not options.train_tool_results:
        yield "score_micro_bs", "has no effect without a model that scores (--kl-coef or --reward-ckpt); leave it out"
