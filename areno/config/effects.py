"""Finds the options that have no effect in a run, and the reasons.

If the user sets such an option, areno reports an error. ``config.yaml`` omits these options.
"""

from collections.abc import Iterator, Sequence

from areno.config.algorithms import AlgorithmSpec
from areno.config.all_train_options import TrainOptions
from areno.config.options import flag_of, options_of
from areno.config.run_options import EvaluationOptions

AGENT_OPTIONS = (
    "agent_timeout_s",
    "agent_retries",
    "agent_max_failures",
    "train_tool_results",
    "turn_discount",
)
"""Options of agentic rollout."""


def listed(names: Sequence[str]) -> str:
    """Join names to a text such as ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def without_effect(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    """Map the name of each option that has no effect in this run to the reason and the remedy."""
    reasons = {}
    for entry in options_of(TrainOptions):
        info = entry.info
        if not spec.reads(entry):
            reasons[entry.name] = f"applies to --algo {listed(info.algorithms)}, not to {spec.name}; remove the option"
        elif info.rollout_only and not spec.requires_rollout:
            reasons[entry.name] = (
                f"has no effect with --algo {spec.name}, which has no rollouts; remove the option, or use an algorithm with "
                "rollouts, such as gspo"
            )
    for name, because in _combinations(options, spec):
        reasons.setdefault(name, because)
    return reasons


def _combinations(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[tuple[str, str]]:
    """Yield options that have no effect because of another option's value."""
    with_other = "has no effect with {}; use only one of them".format
    if options.greedy:
        yield from ((name, with_other("--greedy")) for name in ("temperature", "top_k", "top_p"))
    if options.lr_decay_style == "constant":
        yield from ((name, with_other("--lr-decay-style constant")) for name in ("min_lr", "lr_decay_steps"))
    if options.critic_lr_decay_style == "constant":
        for name in ("critic_min_lr", "critic_lr_decay_steps"):
            yield (
                name,
                "has no effect without --critic-lr-decay-style linear or cosine; set --critic-lr-decay-style too",
            )
    yield from _adapter(options)
    if not options.eval_dataset_path:
        for name in (*(e.name for e in options_of(EvaluationOptions) if e.name != "eval_dataset_path"), "keep_best"):
            yield name, "has no effect without held-out data; set --eval-dataset-path too"
    if options.model_save_interval is None:
        yield (
            "save_async",
            "has no effect without --model-save-interval, because only the models that this option saves are "
            "written in the background; set --model-save-interval too",
        )
    if not options.track:
        yield "track_project", "has no effect without a tracking service; set --track too"
    if spec.requires_rollout and not options.agent_fn:
        for name in AGENT_OPTIONS:
            if not options.workflow:
                yield name, "has no effect without --agent-fn; set --agent-fn too"
            elif name != "agent_max_failures":
                yield (
                    name,
                    "has no effect with --workflow, because the option applies only to --agent-fn; remove the option",
                )
    yield from _memory(options)
    if spec.requires_rollout:
        yield from _reference(options, spec)
        yield from _rewards(options)
        if options.rollout == "sync":
            yield "max_staleness", "has no effect without --rollout async; set --rollout async too"
        if not options.uses_replicas:
            yield (
                "rollout_replicas",
                "has no effect with --rollout sync, which starts no rollout processes; set --rollout async too",
            )
        servers = ("rollout_url", "rollout_server_command", "rollout_server_args")
        for name in servers if options.rollout_backend == "areno" else ():
            yield name, "has no effect with areno's own engine; set --rollout-backend vllm or sglang too"
        if options.rollout_backend != "areno":
            yield (
                "return_routed_experts",
                "has no effect with inference servers, because areno does not read their expert routing; remove the option",
            )
            # An evaluation uses the engine of this process.
            for name in ("speculate", "kv_cache_tokens") if not options.eval_dataset_path else ():
                yield (
                    name,
                    "has no effect on inference servers, which take their options from --rollout-server-args; "
                    "remove the option",
                )
        if options.rollout_url:
            for name in servers[1:]:
                yield name, "has no effect on inference servers that are already running; remove the option"


def _rewards(options: TrainOptions) -> Iterator[tuple[str, str]]:
    """Yield reward options that have no effect, because of ``--turn-discount`` or because no reward function runs."""
    of_parts = ("reward_weights", "reward_normalize_parts")
    of_functions = (*of_parts, "reward_timeout_s", "reward_workers", "reward_memory_gb")
    if options.workflow is not None:
        for name in ("reward_fn_path", "reward_ckpt", "on_reward_error", *of_functions):
            yield name, "has no effect with --workflow, because the workflow returns the rewards; use only one of them"
    elif options.reward_ckpt and not options.reward_fn_path:
        for name in of_functions:
            yield name, "has no effect with --reward-ckpt, which runs no reward function; remove the option"
    if options.turn_discount is not None:
        yield (
            "reward_normalize_parts",
            "has no effect with --turn-discount, which needs a single number as the reward of each turn; use only one of them",
        )


def _adapter(options: TrainOptions) -> Iterator[tuple[str, str]]:
    if not options.uses_lora:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit"):
            yield name, "has no effect without an adapter; set --lora-rank too"
    if options.lora_adapter_path is not None:
        for name in ("lora_rank", "lora_alpha", "lora_target_modules"):
            yield (
                name,
                "has no effect with --lora-adapter-path, because the adapter's adapter_config.json sets the value; use only "
                "one of them",
            )


TUNED_OPTIONS = ("max_running_prompts", "batch_size", "mini_bs")
"""Options that ``--tune-params`` chooses."""


def _memory(options: TrainOptions) -> Iterator[tuple[str, str]]:
    if not options.tune_params:
        for name in ("mem_frac", "tune_max_samples"):
            yield name, "has no effect without tuning; set --tune-params too"
    elif options.resume is not None:
        for name in ("tune_params", "mem_frac", "tune_max_samples"):
            yield (
                name,
                "has no effect with --resume, because a resumed run keeps the batch sizes that it started with; "
                "remove the option",
            )
    elif options.explicit.issuperset(TUNED_OPTIONS):
        flags = listed([flag_of(name) for name in TUNED_OPTIONS])
        yield "tune_params", f"has nothing to choose, because {flags} are all set; remove one of them"
    if not options.activation_checkpointing:
        yield (
            "offload_activations",
            "has no effect with --no-activation-checkpointing, which leaves nothing to offload; use only one of them",
        )
    for name, what in (("offload_optimizer", "the optimizer"), ("offload_activations", "every activation")):
        if options.device == "cpu" and getattr(options, name):
            yield name, f"has no effect on a CPU, because {what} is in host memory anyway; remove the option"


def _reference(options: TrainOptions, spec: AlgorithmSpec) -> Iterator[tuple[str, str]]:
    """Yield options without effect, with the reasons: options of KL terms and of the reference model."""
    ppo = spec.name == "ppo" or "use_kl_loss" in spec.uses
    if options.kl_reward_coef == 0:
        yield "kl_reward_type", "has no effect without a KL penalty; set --kl-reward-coef too"
    if options.use_kl_loss if ppo else options.kl_coef > 0:
        return
    because = (
        "has no effect with --no-use-kl-loss; use only one of them"
        if ppo
        else "has no effect without a KL term; set --kl-coef too"
    )
    for name in ("kl_loss_type", "kl_loss_coef"):
        yield name, because
    if options.takes_reference(ppo):
        return
    yield "ref_ckpt", because
    if not ppo and not options.reward_ckpt and not options.train_tool_results:
        yield (
            "score_micro_bs",
            "has no effect without a reference model (--kl-coef, --kl-reward-coef), a reward model (--reward-ckpt) or "
            "--train-tool-results; remove the option",
        )
