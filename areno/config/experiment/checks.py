"""Checks that the sections of an experiment are consistent, and that areno supports the settings.

Settings that would silently make results wrong are errors, such as a KL term without a reference. Most settings without effect
are errors too; ``notices`` lists the settings without effect that are accepted.
"""

from collections.abc import Iterator
from dataclasses import replace

from areno.config.experiment.backends import backend_problems
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import EXPERIMENTS, BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig
from areno.config.experiment.named_algorithm import check_algorithm
from areno.config.experiment.roles import CLUSTERS, engine_of, same_layout
from areno.config.experiment.run_sections import WorkflowConfig
from areno.config.experiment.setting_declaration import at, ineffective, settings_of, shown, walk
from areno.config.options import nearest
from areno.config.paths import is_address

_SECTIONS_WITH_FILES = ("saver", "recover")  # their fileroot may differ from cluster.fileroot
_OF_EACH_ROLE = {"experiment_name", "trial_name", "path", "model_type", "is_critic", "temperature", "backend"}
_OF_EACH_ROLE |= {"scheduling_strategy", "scheduling_spec", "mb_spec", "optimizer", "archon", "megatron"}
_OF_EACH_OPTIMIZER = {"optimizer_dtype", "grad_reduce_dtype", "offload"}


def check_config(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield a message about each problem, with the setting, its value and the remedy."""
    yield from _names(config)
    for path, entry, value in walk(config):
        if entry.shape == "section" and callable(getattr(type(value), "problems", None)):
            yield from at(path, value.problems())
    yield from _data(config)
    yield from _models(config)
    if isinstance(config, PPOConfig):
        yield from _policy(config)
    else:
        yield from _without_rollout(config)
    yield from _refusals(config)
    yield from backend_problems(config)
    yield from _cluster(config)


def _cluster(config: BaseExperimentConfig) -> Iterator[str]:
    cluster, documented = config.cluster, settings_of(type(config.cluster))["n_nodes"].info.documented
    if config.scheduler.type not in CLUSTERS:
        if cluster.n_nodes not in (1, documented):
            yield (
                f"cluster.n_nodes={cluster.n_nodes} needs a cluster, but scheduler.type is neither ray nor slurm; set one of "
                "these types, or remove cluster.n_nodes"
            )
        return
    if config.scheduler.type == "slurm" and cluster.n_gpus_per_node is None:
        yield (
            "cluster.n_gpus_per_node is null, but scheduler.type=slurm needs the number of GPUs per node; set this number, or "
            "0 to run on CPUs"
        )
    names = cluster.name_resolve.type
    if names == "memory" or (names == "ray" and config.scheduler.type != "ray"):
        yield (
            f"cluster.name_resolve.type={names} does not work across the processes of "
            f"scheduler.type={config.scheduler.type}; use nfs or etcd3"
        )
    if isinstance(config, PPOConfig) and config.actor.weight_update_mode == "shm":
        yield (
            "actor.weight_update_mode=shm needs shared memory, but different machines share no memory; use xccl, or use disk "
            "with a cluster.fileroot that all machines share"
        )


def _names(config: BaseExperimentConfig) -> Iterator[str]:
    for name, forbidden, instead in (("experiment_name", "_/", "-"), ("trial_name", "-/", "_")):
        value = getattr(config, name)
        if wrong := [letter for letter in forbidden if letter in value]:
            better = value.translate(str.maketrans(dict.fromkeys(forbidden, instead)))
            yield f"{name} {value!r} must not contain {wrong[0]!r}, which areno uses as a separator; write {better}"
        elif value and (value.startswith(".") or not value.isprintable() or value != value.strip()):
            yield (
                f"{name} {value!r} cannot be a folder name, because it starts with a dot, contains an unprintable character, "
                "or begins or ends with a space; choose another name"
            )
    root = config.cluster.fileroot
    for path, _, value in walk(config):
        section, _, name = path.rpartition(".")
        if section and name in ("experiment_name", "trial_name") and value != getattr(config, name):
            yield (
                f"{path} {value!r} differs from {name} {getattr(config, name)!r}: recovery finds an experiment by its "
                f"name, so {name} must have the same value in all sections; remove {path}"
            )
        if name == "fileroot" and section not in ("cluster", *_SECTIONS_WITH_FILES) and value != root:
            yield (
                f"{path} {value!r} differs from cluster.fileroot {root!r}, but only saver.fileroot and recover.fileroot may "
                f"differ from cluster.fileroot; remove {path}"
            )


def _data(config: BaseExperimentConfig) -> Iterator[str]:
    kind = config.train_dataset.type
    config_cls = EXPERIMENTS.get(kind)
    if config_cls is None:
        yield f"train_dataset.type {kind!r} is unknown{nearest(kind, EXPERIMENTS)}; choose {', '.join(EXPERIMENTS)}"
    elif not isinstance(config, PPOConfig if kind == "rl" else config_cls) and isinstance(
        config, tuple(EXPERIMENTS.values())
    ):
        yield (
            f"train_dataset.type {kind!r} is for {config_cls.__name__}, but the experiment is a {type(config).__name__}; "
            "correct the type or the class"
        )
    valid, evaluator = config.valid_dataset, config.evaluator
    uses_best = evaluator.keep_best or evaluator.early_stop_patience is not None
    if valid is None and (evaluator.has_frequency or uses_best or evaluator.eval_before_train):
        yield "evaluator has no data to evaluate on; set valid_dataset, or remove the evaluator's settings"
    elif uses_best and not evaluator.has_frequency:
        yield (
            "evaluator.keep_best and evaluator.early_stop_patience need evaluations during training; set "
            "evaluator.freq_steps, freq_epochs or freq_secs too"
        )
    if valid is not None and valid.type != kind:
        yield f"valid_dataset.type {valid.type!r} differs from train_dataset.type {kind!r}; make the two types equal"
    if valid is not None and not config.train_dataset.drop_last:
        because = "because an evaluation uses all rows; remove the setting"
        yield from at("valid_dataset", ineffective(valid, ("drop_last",), because))


def _models(config: BaseExperimentConfig) -> Iterator[str]:
    for role, is_critic in {"actor": isinstance(config, RWConfig), "ref": False, "critic": True}.items():
        engine = engine_of(config, role)
        if engine is not None and engine.is_critic != is_critic:
            kind = "a model with a scalar head" if is_critic else "a policy"
            yield (
                f"{role}.is_critic is {shown(engine.is_critic)}, but {role} must be {kind}; set "
                f"{role}.is_critic={shown(is_critic)}"
            )
    actor = engine_of(config, "actor")
    if actor is None:
        return
    if actor.optimizer is None:
        yield "actor.optimizer is missing, so nothing would be trained; set an optimizer, such as actor.optimizer.lr=1e-5"
    tokenizers = {"tokenizer_path": config.tokenizer_path}
    if isinstance(config, PPOConfig):
        tokenizers["rollout.tokenizer_path"] = config.rollout.tokenizer_path
    for name, value in tokenizers.items():
        if value not in ("", actor.path):
            yield (
                f"{name} {value!r} differs from actor.path {actor.path!r}, but areno loads the tokenizer only from the model's "
                f"folder; remove {name}"
            )
    for role in ("critic", "ref"):
        if (engine := engine_of(config, role)) is not None:
            yield from _shared_engine(role, engine, actor)


def _shared_engine(role: str, engine: TrainEngineConfig, actor: TrainEngineConfig) -> Iterator[str]:
    """Yield a problem for each setting of ``role`` that has no effect in the actor's engine, which runs this role."""
    for spec in engine.scheduling_spec[:1]:
        if actor.scheduling_spec and spec.env_vars not in ({}, actor.scheduling_spec[0].env_vars):
            yield (
                f"{role}.scheduling_spec.0.env_vars differs from actor.scheduling_spec.0.env_vars, but {role} runs in the "
                "actor's processes; move the variables to actor.scheduling_spec.0.env_vars"
            )
    shared, own = settings_of(TrainEngineConfig), _OF_EACH_ROLE | (_OF_EACH_OPTIMIZER if role == "critic" else set())
    for name, entry in settings_of(type(engine)).items():
        value = getattr(engine, name)
        if role == "critic" and name == "fsdp":
            value = replace(value, per_layer_optim_step=actor.fsdp.per_layer_optim_step)
        if value in (entry.default, getattr(actor, name, entry.default), entry.info.documented):
            continue
        setting = f"{role}.{name} {shown(value)}".strip()
        if name in shared and name not in own and not entry.info.no_effect:
            yield f"{setting} has no effect: {role} runs in the actor's engine and uses actor.{name}; remove {role}.{name}"
        elif name not in shared and role == "ref":
            yield f"{setting} has no effect: a reference is not trained; remove the setting"


def _without_rollout(config: BaseExperimentConfig) -> Iterator[str]:
    actor = engine_of(config, "actor")
    if actor is None:
        return
    if isinstance(config, DPOConfig):
        yield from check_algorithm(config.actor)
        if config.actor.algorithm and config.ref.path != config.actor.path:
            yield f"ref.path {config.ref.path} has no effect: the loss of actor.algorithm needs no reference; remove ref.path"
    because = "in an experiment without rollouts; remove the setting"
    yield from at("actor", ineffective(actor, ("weight_update_mode", "temperature"), because))


def _policy(config: PPOConfig) -> Iterator[str]:
    yield from at("actor", config.actor.policy_problems())
    yield from check_algorithm(config.actor, config.teacher is not None)
    yield from _reference(config)
    yield from _reward_model(config)
    yield from _sampling(config)
    yield from _groups(config)
    yield from _rollout(config)
    yield from _strategies(config)
    yield from _teacher(config)


def _reference(config: PPOConfig) -> Iterator[str]:
    for name in ("kl_ctl", "kl_loss_coef"):
        if getattr(config.actor, name) > 0 and config.ref is None:
            yield (
                f"actor.{name} {getattr(config.actor, name)} needs a reference for the KL term, but the section ref is "
                f"missing; add this section, or set actor.{name}=0"
            )
    critic = config.critic
    if critic is not None and critic.optimizer is None:
        yield (
            "critic.optimizer is missing, so the critic would not be trained; set an optimizer, such as "
            "critic.optimizer.lr=1e-5"
        )
    if critic is not None and critic.mask_no_eos_with_zero != config.actor.mask_no_eos_with_zero:
        yield (
            "critic.mask_no_eos_with_zero differs from actor.mask_no_eos_with_zero, but actor and critic use the same reward; "
            "remove critic.mask_no_eos_with_zero"
        )


def _reward_model(config: PPOConfig) -> Iterator[str]:
    """Check that no setting conflicts with the reward model of ``reward.path``.

    The reward model scores only answers with a single turn, and only after all answers of a batch are complete.
    """
    reward, workflow = config.reward_section, config.workflow_section
    if not reward.path:
        return
    because = "with reward.path, because the reward model computes the rewards; use only one of the two settings"
    names = ("fn", "weights", "normalize_parts", "timeout_seconds", "max_retries", "max_workers", "on_error")
    yield from at("reward", ineffective(reward, names, because))
    agent = config.rollout.agent.agent_cls_path
    if agent or workflow.path != "rlvr":
        who = f"rollout.agent.agent_cls_path {agent}" if agent else f"workflow.path {workflow.path}"
        yield f"reward.path has no effect with {who}, which computes rewards itself; use only one of the two settings"
    for name, value in {
        "workflow.dynamic_filter_fn": workflow.dynamic_filter_fn or None,
        "success_rate_lb": config.success_rate_lb,
        "success_rate_ub": config.success_rate_ub,
        "rollout.dump_to_file": config.rollout.dump_to_file or None,
    }.items():
        if value is not None:
            yield (
                f"{name} needs each reward at the end of its episode, but the reward model (reward.path) computes the rewards "
                f"only after the last episode of the batch; use only one of the settings {name} and reward.path"
            )


def _sampling(config: PPOConfig) -> Iterator[str]:
    sampled, rollout, batch = config.gconfig, config.rollout, config.train_dataset.batch_size
    for role in ("actor", "ref", "critic"):
        for name in ("temperature", "max_new_tokens"):
            value = getattr(sampled, name)
            other = getattr(getattr(config, role), name, value)
            if other != value:
                yield f"{role}.{name} {other} differs from gconfig.{name} {value}, which sampling uses; remove {role}.{name}"
    if rollout.consumer_batch_size != batch:
        yield (
            f"rollout.consumer_batch_size {rollout.consumer_batch_size} differs from train_dataset.batch_size {batch}, the "
            "number of prompts per step; remove rollout.consumer_batch_size"
        )
    if rollout.use_lora != config.actor.use_lora:
        yield "rollout.use_lora differs from actor.use_lora, but the rollout uses the actor's weights; remove rollout.use_lora"
    if rollout.lora_name != sampled.lora_name:
        yield (
            f"rollout.lora_name {rollout.lora_name!r} differs from gconfig.lora_name {sampled.lora_name!r}; remove "
            "rollout.lora_name"
        )
    if config.eval_gconfig is not None and config.valid_dataset is None:
        yield "eval_gconfig has no effect without valid_dataset; set valid_dataset too"
    for name in ("gconfig", "eval_gconfig"):
        if getattr(config, name) is not None and not config.actor.use_lora:
            yield from at(
                name, ineffective(getattr(config, name), ("lora_name",), "without an adapter; set actor.use_lora too")
            )


def _groups(config: PPOConfig) -> Iterator[str]:
    samples = config.gconfig.n_samples
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, name)
        if norm is None or "group" not in (norm.mean_level, norm.std_level):
            continue
        if norm.group_size != samples:
            yield (
                f"actor.{name}.group_size {norm.group_size} differs from gconfig.n_samples {samples}, the number of answers "
                f"per prompt; remove actor.{name}.group_size"
            )
        if samples == 1 and norm.mean_level == "group":
            yield (
                f"actor.{name}.mean_level=group subtracts the mean over the answers to the same prompt, but each prompt has "
                f"only one answer (gconfig.n_samples is 1); set gconfig.n_samples to at least 2, or actor.{name}.mean_level to "
                "batch"
            )
    rows = samples * config.train_dataset.batch_size
    for role, engine in (("actor", config.actor), ("critic", config.critic)):
        if engine is not None and engine.ppo_n_minibatches > rows:
            yield (
                f"{role}.ppo_n_minibatches {engine.ppo_n_minibatches} is more than {rows}, the number of rows per step "
                f"(train_dataset.batch_size x gconfig.n_samples); use at most {rows}"
            )
    low, high = config.success_rate_lb, config.success_rate_ub
    if low is not None and high is not None and low > high:
        yield f"success_rate_lb {low} is above success_rate_ub {high}, which would filter out every prompt; swap the two values"


def _rollout(config: PPOConfig) -> Iterator[str]:
    agent, path = config.rollout.agent, getattr(config.workflow, "path", "")  # a subclass may have its own `workflow`
    if agent.agent_cls_path and path not in ("", "agent", settings_of(WorkflowConfig)["path"].default):
        yield (
            f"rollout.agent.agent_cls_path {agent.agent_cls_path!r} and workflow.path {path!r} are mutually "
            "exclusive; use only one of the two settings"
        )
    if path == "agent" and not agent.agent_cls_path:
        yield "workflow.path=agent needs an agent; set rollout.agent.agent_cls_path to file.py:NAME or module.NAME"
    ahead = config.rollout.max_head_offpolicyness
    if config.async_training is not None and config.async_training != (ahead > 0):
        yield (
            f"async_training {shown(config.async_training)} contradicts rollout.max_head_offpolicyness {ahead} (0 means "
            "synchronous training); remove async_training"
        )


def _strategies(config: PPOConfig) -> Iterator[str]:
    """Check each ``scheduling_strategy`` of type colocation.

    Rollout and actor may share devices with each other. Ref and critic run in the actor's processes, on the actor's devices.
    """
    for role, partner in {"rollout": "actor", "actor": "rollout", "ref": "actor", "critic": "actor"}.items():
        engine = getattr(config, role)
        if engine is None or engine.scheduling_strategy.type != "colocation":
            continue
        where, strategy = f"{role}.scheduling_strategy", engine.scheduling_strategy
        if strategy.target not in (None, "", partner):
            yield (
                f"{where}.target {strategy.target!r}: {role} can only share the devices of {partner}; write "
                f"{where}.target={partner}"
            )
        if not strategy.fork and role in ("actor", "rollout") and not same_layout(config):
            yield (
                f"{where}.fork=false makes rollout and training alternate on the actor's engine, but rollout.backend "
                f"{config.rollout.backend} and actor.backend {config.actor.backend} have different parallel sizes; use equal "
                f"sizes, or remove {where}.fork"
            )


def _teacher(config: PPOConfig) -> Iterator[str]:
    if config.teacher is None:
        return
    if config.actor.init_from_scratch and config.teacher.path == config.actor.path:
        yield (
            f"teacher.path {config.teacher.path} is also actor.path, but actor.init_from_scratch gives all models that "
            "are loaded from this path random weights; use another teacher, or set actor.path to a copy of the folder"
        )
    if is_address(config.teacher.path) and config.gconfig.temperature != 1:
        yield (
            f"teacher.path={config.teacher.path}: a server computes log-probs at temperature 1, but gconfig.temperature is "
            f"{config.gconfig.temperature}; set gconfig.temperature to 1, or teacher.path to the teacher's model folder"
        )
    for name in ("rollout", "train"):
        section = getattr(config.teacher, name)
        for path, entry, value in walk(section) if section is not None else ():
            key = path.rpartition(".")[2]
            same = [entry.default, config.teacher.path, config.cluster.fileroot]
            same += [getattr(part, key, None) for part in (config, config.actor, config.rollout, config.gconfig)]
            agrees = value in same or key in ("consumer_batch_size", "max_concurrent_rollouts", "temperature")
            if not entry.is_section and not agrees:
                setting_text = f"teacher.{name}.{path} {shown(value)}".strip()
                because = "because areno starts no separate engine for the teacher"
                yield f"{setting_text} has no effect, {because}; remove the setting"


def _refusals(config: BaseExperimentConfig) -> Iterator[str]:
    refused: dict[tuple[str, str], list[str]] = {}
    for path, entry, value in walk(config):
        if reason := entry.refusal(value):
            where, _, name = path.rpartition(".")
            text = f"{name}={value}" if isinstance(value, str | int | float) else name
            refused.setdefault((where, reason), []).append(text)
    for (where, reason), names in refused.items():
        yield f"{where + ': ' if where else ''}{', '.join(names)}: {reason}"
