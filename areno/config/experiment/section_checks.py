"""Checks of single sections: settings of one section that contradict each other, or that another one makes idle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from areno.config.experiment.engine_sections import (
    ATTENTION,
    ATTENTION_HERE,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areno.config.experiment.generation_sections import AgentConfig, GenerationHyperparameters, InferenceEngineConfig
from areno.config.experiment.run_sections import SAVES_NOTHING, SaverConfig
from areno.config.experiment.settings import changed
from areno.config.experiment.worker_sections import SchedulingStrategy
from areno.config.options import nearest
from areno.config.packages import missing_packages
from areno.config.policy_loss_options import RejectionSamplingConfig

_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.]+)?")
_MEGATRON_LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
_TRANSFORMERS_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Problems = Iterator[tuple[str, str]]
"""Pairs of a setting's name inside the section and what is wrong with it."""


def idle(config: Any, names: tuple[str, ...], because: str, prefix: str = "") -> Problems:
    """Settings that nothing reads, where they differ from their defaults."""
    for name in changed(config, names):
        yield prefix + name, f"{shown(getattr(config, name))} has no effect {because}"


def at(path: str, problems: Problems) -> Iterator[str]:
    """Problems of a section with its path."""
    return (f"{path}.{name} {problem}" for name, problem in problems)


def shown(value: Any) -> str:
    """A value as YAML writes it; nothing for a section."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | str) else ""


def _check_optimizer(config: OptimizerConfig) -> Problems:
    if config.type == "sgd":
        yield from idle(config, ("beta1", "beta2", "eps"), "with type sgd; leave it out, or use type adam")
    if config.lr_scheduler_type == "constant":
        yield from idle(config, ("min_lr_ratio",), "with lr_scheduler_type constant; use linear or cosine")


def _check_micro_batches(config: MicroBatchSpec) -> Problems:
    if config.n_mbs is None and config.max_tokens_per_mb is None:
        yield "n_mbs", "null leaves the number of micro-batches open; give it, or max_tokens_per_mb"


def _check_norm(config: NormConfig) -> Problems:
    if config.mean_level is None:
        yield from idle(config, ("mean_leave1out",), "without a mean; set mean_level too")
    if config.std_level is None:
        yield from idle(config, ("std_unbiased", "eps"), "without a standard deviation; set std_level too")
    if config.mean_level is None and config.std_level is None:
        yield "mean_level", "and std_level are both null, which normalises nothing; set the section to null instead"


def _check_generation(config: GenerationHyperparameters) -> Problems:
    if config.min_new_tokens > config.max_new_tokens:
        yield "min_new_tokens", f"{config.min_new_tokens} is above max_new_tokens {config.max_new_tokens}; lower it"
    if config.greedy:
        yield from idle(config, ("temperature", "top_p", "top_k"), "with greedy; leave one of the two out")
        if config.n_samples > 1:
            yield "greedy", f"with n_samples {config.n_samples} gives the same answer again and again; use n_samples 1"


def _check_train_engine(config: TrainEngineConfig) -> Problems:
    name = config.attn_impl
    if name not in ATTENTION and not _HUB_KERNEL.fullmatch(name):
        choices = f"choose {', '.join(ATTENTION)}, or owner/repo[@revision][:entry]"
        yield "attn_impl", f"{name!r} is unknown{nearest(name, ATTENTION)}; {choices}"
    elif name not in ATTENTION_HERE:
        yield "attn_impl", f"{name} is not supported; leave it out, or choose {', '.join(ATTENTION_HERE[1:])}"
    if not config.use_lora:
        names = ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit")
        yield from idle(config, names, "without an adapter; set use_lora too")
    elif missing := missing_packages("qlora" if config.load_in_4bit else "lora"):
        yield ("load_in_4bit" if config.load_in_4bit else "use_lora"), f"needs {missing}"
    if not config.gradient_checkpointing:
        because = "without gradient_checkpointing, which leaves inputs of layers to offload; set that too"
        yield from idle(config, ("offload_activations",), because)
    if config.enable_tree_training and config.mb_spec.packing_algorithm != "ffd":
        remedy = "set mb_spec.packing_algorithm to ffd, or leave it out"
        yield "enable_tree_training", f"packs rows by what they share; {remedy}"
    if megatron := sorted({*config.target_modules} & _MEGATRON_LAYERS):
        remedy = f"write [{', '.join(_TRANSFORMERS_LAYERS)}], or leave it out for all linear layers"
        yield "target_modules", f"{', '.join(megatron)} are layers of Megatron; {remedy}"
    yield from _workers(config.scheduling_spec, (1, 2))


def _check_saver(config: SaverConfig) -> Problems:
    if config.mode == SAVES_NOTHING:
        because = f"with mode {SAVES_NOTHING}; leave one of the two out"
        yield from idle(config, ("freq_epochs", "freq_steps", "freq_secs"), because)


def _check_rollout(config: InferenceEngineConfig) -> Problems:
    yield from _workers(config.scheduling_spec, (1, 2))
    if config.max_staleness is None:
        yield from idle(config, ("on_stale",), "without an exact bound; set max_staleness too")


def _check_agent(config: AgentConfig) -> Problems:
    yield from _workers(config.scheduling_spec, (1,))
    for spec in config.scheduling_spec:
        because = "for agents, which run in the trainer's process or inherit its environment; leave it out"
        yield from idle(spec, ("cpu", "env_vars"), because, "scheduling_spec.0.")
    if config.mode != "subproc":
        yield from idle(config, ("subproc_max_workers",), "without processes; set mode to subproc too")


def _workers(specs: list[Any], counts: tuple[int, ...]) -> Problems:
    if len(specs) not in counts:
        yield "scheduling_spec", f"has {len(specs)} entries; give {' or '.join(map(str, counts))}"
    for spec in specs[1:]:
        because = "in a second entry, because worker and engine are one process; write it into the first"
        yield from idle(spec, ("env_vars",), because, "scheduling_spec.1.")


def _check_strategy(config: SchedulingStrategy) -> Problems:
    if config.type == "colocation" and not config.target:
        yield "target", "is missing: name the role whose devices are shared, such as actor"
    if config.type == "separation":
        yield from idle(config, ("target", "fork"), "with type separation; use colocation")


def check_actor(config: PPOActorConfig) -> Problems:
    """Knobs of the loss that exclude each other or do nothing."""
    yield from config.problems()
    if config.use_decoupled_loss and config.recompute_logprob and not config.needs_proximal:
        method = config.prox_logp_method
        yield (
            "recompute_logprob",
            f"has no effect with prox_logp_method {method}, which needs no forward pass; leave one out",
        )
    if config.kl_ctl == 0:
        yield from idle(config, ("kl_estimator",), "with kl_ctl 0; set kl_ctl too")
    if config.kl_loss_coef == 0:
        yield from idle(config, ("kl_loss_type",), "with kl_loss_coef 0; set kl_loss_coef too")
    if not config.log_agent_stats:
        yield from idle(config, ("log_agent_stats_keys",), "without log_agent_stats; set it too")
    overlong = ("overlong_tokens", "overlong_penalty_factor")
    if not config.overlong_reward_penalty:
        yield from idle(config, overlong, "without the penalty; set overlong_reward_penalty too")
        return
    for name in overlong:
        if getattr(config, name) is None:
            yield name, "is missing: overlong_reward_penalty needs it"
    if config.overlong_tokens is not None and config.overlong_tokens > config.max_new_tokens:
        yield (
            "overlong_tokens",
            f"{config.overlong_tokens} is more than max_new_tokens {config.max_new_tokens}; lower it",
        )


def _check_teacher(config: TeacherConfig) -> Problems:
    other = "train" if config.engine_type == "rollout" else "rollout"
    if getattr(config, other) is not None:
        yield other, f"has no effect with engine_type {config.engine_type}; leave it out"
    if not config.path:
        yield "path", "is missing: give the teacher's model folder or repo id"
    if config.rl_loss_weight == config.distill_loss_weight == 0:
        yield "distill_loss_weight", "and rl_loss_weight are both 0, so nothing would be learned; give one a weight"


_CHECKS: dict[type, Callable[[Any], Problems]] = {
    OptimizerConfig: _check_optimizer,
    MicroBatchSpec: _check_micro_batches,
    NormConfig: _check_norm,
    RejectionSamplingConfig: RejectionSamplingConfig.problems,
    GenerationHyperparameters: _check_generation,
    TrainEngineConfig: _check_train_engine,
    InferenceEngineConfig: _check_rollout,
    AgentConfig: _check_agent,
    SaverConfig: _check_saver,
    SchedulingStrategy: _check_strategy,
    TeacherConfig: _check_teacher,
}


def section_problems(section: Any) -> Problems:
    """What is wrong within one section; one of a derived class goes through the check of its base."""
    for base, check in _CHECKS.items():
        if isinstance(section, base):
            yield from check(section)
