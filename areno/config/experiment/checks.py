"""Checks of a whole experiment: sections against each other, and what is asked for that is not supported.

Everything that would be silently wrong is loud here: a KL without a reference, groups that are not the answers to one
prompt, settings that nothing reads.
"""

from collections.abc import Iterator

from areno.config.experiment.backends import backend_problems
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import EXPERIMENTS, BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig
from areno.config.experiment.named_algorithm import check_algorithm
from areno.config.experiment.roles import CLUSTERS, engine_of, same_layout
from areno.config.experiment.run_sections import WorkflowConfig
from areno.config.experiment.settings import at, idle, settings_of, shown, walk
from areno.config.options import nearest
from areno.config.paths import is_address

_SECTIONS_WITH_FILES = ("saver", "recover")  # whose files may lie under a root of their own
_OF_EACH_ROLE = {"experiment_name", "trial_name", "path", "model_type", "is_critic", "temperature", "backend"}
_OF_EACH_ROLE |= {"scheduling_strategy", "scheduling_spec", "mb_spec", "optimizer", "archon", "megatron"}


def check_config(config: BaseExperimentConfig) -> Iterator[str]:
    """Say why the settings make no experiment that can work: every problem, with its setting, value and remedy."""
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
    """Several machines: who starts processes on them, and how weights get there."""
    cluster, documented = config.cluster, settings_of(type(config.cluster))["n_nodes"].info.documented
    if config.scheduler.type not in CLUSTERS:
        if cluster.n_nodes not in (1, documented):
            yield f"cluster.n_nodes={cluster.n_nodes}: only scheduler.type=ray and slurm use several machines; set one of them"
        return
    if config.scheduler.type == "slurm" and cluster.n_gpus_per_node is None:
        yield "cluster.n_gpus_per_node is null: say how many GPUs of a node the Slurm job is to have; 0 computes on CPUs"
    names = cluster.name_resolve.type
    if names == "memory" or (names == "ray" and config.scheduler.type != "ray"):
        yield (
            f"cluster.name_resolve.type={names} does not go with scheduler.type={config.scheduler.type}, whose processes it "
            "does not reach; use nfs or etcd3"
        )
    if isinstance(config, PPOConfig) and config.actor.weight_update_mode == "shm":
        yield "actor.weight_update_mode=shm: machines share no memory; use xccl, or disk with a shared cluster.fileroot"


def _names(config: BaseExperimentConfig) -> Iterator[str]:
    for name, forbidden, instead in (("experiment_name", "_/", "-"), ("trial_name", "-/", "_")):
        value = getattr(config, name)
        if wrong := [letter for letter in forbidden if letter in value]:
            better = value.translate(str.maketrans(dict.fromkeys(forbidden, instead)))
            yield f"{name} {value!r} must not contain {wrong[0]!r}, which separates names; write {better}"
        elif value and (value.startswith(".") or not value.isprintable() or value != value.strip()):
            yield f"{name} {value!r} names a folder: it must not begin with a dot, nor hold line breaks or outer spaces"
    root = config.cluster.fileroot
    for path, _, value in walk(config):
        section, _, name = path.rpartition(".")
        if section and name in ("experiment_name", "trial_name") and value != getattr(config, name):
            yield (
                f"{path} {value!r} differs from {name} {getattr(config, name)!r}: an experiment has one name, by which "
                f"recovery finds it; leave {path} out"
            )
        if name == "fileroot" and section not in ("cluster", *_SECTIONS_WITH_FILES) and value != root:
            yield (
                f"{path} {value!r} differs from cluster.fileroot {root!r}: only checkpoints may lie elsewhere "
                f"(saver.fileroot, recover.fileroot); leave {path} out"
            )


def _data(config: BaseExperimentConfig) -> Iterator[str]:
    kind = config.train_dataset.type
    known = EXPERIMENTS.get(kind)
    if known is None:
        yield f"train_dataset.type {kind!r} is unknown{nearest(kind, EXPERIMENTS)}; choose {', '.join(EXPERIMENTS)}"
    elif not isinstance(config, PPOConfig if kind == "rl" else known) and isinstance(
        config, tuple(EXPERIMENTS.values())
    ):
        yield f"train_dataset.type {kind!r} is for {known.__name__}, and this is {type(config).__name__}; correct one of them"
    valid, evaluator = config.valid_dataset, config.evaluator
    judges = evaluator.keep_best or evaluator.early_stop_patience is not None
    if valid is None and (evaluator.has_frequency or judges or evaluator.eval_before_train):
        yield "evaluator has nothing to evaluate on; give valid_dataset, or leave the evaluator's frequencies out"
    elif judges and not evaluator.has_frequency:
        yield (
            "evaluator.keep_best and evaluator.early_stop_patience need evaluations during training; give "
            "evaluator.freq_steps, freq_epochs or freq_secs too"
        )
    if valid is not None and valid.type != kind:
        yield f"valid_dataset.type {valid.type!r} differs from train_dataset.type {kind!r}; make them equal"
    if valid is not None and not config.train_dataset.drop_last:
        because = "because an evaluation takes all rows together; leave it out"
        yield from at("valid_dataset", idle(valid, ("drop_last",), because))


def _models(config: BaseExperimentConfig) -> Iterator[str]:
    """What the sections of models say about each other."""
    for role, is_critic in {"actor": isinstance(config, RWConfig), "ref": False, "critic": True}.items():
        engine = engine_of(config, role)
        if engine is not None and engine.is_critic != is_critic:
            what = (
                "a model that gives numbers (reward model, critic)" if is_critic else "a policy, which gives log-probs"
            )
            yield f"{role}.is_critic {shown(engine.is_critic)}: {role} is {what} here; set {role}.is_critic={shown(is_critic)}"
    actor = engine_of(config, "actor")
    if actor is None:
        return
    if actor.optimizer is None:
        yield "actor.optimizer is missing, so nothing would be trained; give it, such as actor.optimizer.lr=1e-5"
    tokenizers = {"tokenizer_path": config.tokenizer_path}
    if isinstance(config, PPOConfig):
        tokenizers["rollout.tokenizer_path"] = config.rollout.tokenizer_path
    for name, value in tokenizers.items():
        if value not in ("", actor.path):
            yield (
                f"{name} {value!r} differs from actor.path {actor.path!r}: a model has its tokenizer in its folder; leave it "
                "out"
            )
    for role in ("critic", "ref"):
        if (engine := engine_of(config, role)) is not None:
            yield from _in_the_actors_engine(role, engine, actor)


def _in_the_actors_engine(role: str, engine: TrainEngineConfig, actor: TrainEngineConfig) -> Iterator[str]:
    """What a role that lives there cannot have of its own."""
    for spec in engine.scheduling_spec[:1]:
        if actor.scheduling_spec and spec.env_vars not in ({}, actor.scheduling_spec[0].env_vars):
            yield (
                f"{role}.scheduling_spec.0.env_vars differs from the actor's, in whose processes {role} lives; write them "
                "into actor.scheduling_spec.0.env_vars"
            )
    shared = settings_of(TrainEngineConfig)
    for name, entry in settings_of(type(engine)).items():
        value = getattr(engine, name)
        if value in (entry.default, getattr(actor, name, entry.default), entry.info.documented):
            continue
        words = f"{role}.{name} {shown(value)}".strip()
        if name in shared and name not in _OF_EACH_ROLE and not entry.info.no_effect:
            yield f"{words} has no effect: {role} lives in the actor's engine, which decides it; leave it out"
        elif name not in shared and role == "ref":
            yield f"{words} has no effect: a reference is not trained; leave it out"


def _without_rollout(config: BaseExperimentConfig) -> Iterator[str]:
    actor = engine_of(config, "actor")
    if actor is None:
        return
    if isinstance(config, DPOConfig):
        yield from check_algorithm(config.actor)
        if config.actor.algorithm and config.ref.path != config.actor.path:
            yield f"ref.path {config.ref.path} has no effect with actor.algorithm, which needs no reference; leave it out"
    because = "in an experiment that generates nothing; leave it out"
    yield from at("actor", idle(actor, ("weight_update_mode",), because))
    yield from at("actor", idle(actor, ("temperature",), "in an experiment that samples nothing; leave it out"))


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
                f"actor.{name} {getattr(config.actor, name)} needs a reference to take the KL to, and there is no ref; add a "
                f"section ref, or set actor.{name}=0"
            )
    critic = config.critic
    if critic is not None and critic.optimizer is None:
        yield "critic.optimizer is missing, so the critic would not learn; give it, such as critic.optimizer.lr=1e-5"
    if critic is not None and critic.mask_no_eos_with_zero != config.actor.mask_no_eos_with_zero:
        yield "critic.mask_no_eos_with_zero differs from the actor's, but both learn from one reward; leave it out"


def _reward_model(config: PPOConfig) -> Iterator[str]:
    """A reward model judges finished answers of one turn, when their batch is complete."""
    reward, workflow = config.reward_section, config.workflow_section
    if not reward.path:
        return
    because = "with reward.path, whose model gives the rewards; leave one of the two out"
    names = ("fn", "weights", "normalize_parts", "timeout_seconds", "max_retries", "max_workers", "on_error")
    yield from at("reward", idle(reward, names, because))
    agent = config.rollout.agent.agent_cls_path
    if agent or workflow.path != "rlvr":
        who = f"rollout.agent.agent_cls_path {agent}" if agent else f"workflow.path {workflow.path}"
        yield f"reward.path has no effect with {who}, which gives rewards itself; leave one of the two out"
    for name, value in {
        "workflow.dynamic_filter_fn": workflow.dynamic_filter_fn or None,
        "success_rate_lb": config.success_rate_lb,
        "success_rate_ub": config.success_rate_ub,
        "rollout.dump_to_file": config.rollout.dump_to_file or None,
    }.items():
        if value is not None:
            yield f"{name} reads the reward of an episode as it ends, and reward.path gives it later; leave one of the two out"


def _sampling(config: PPOConfig) -> Iterator[str]:
    """What several sections repeat must be equal: the policy that is trained is the one that sampled."""
    sampled, rollout, batch = config.gconfig, config.rollout, config.train_dataset.batch_size
    for role in ("actor", "ref", "critic"):
        for name in ("temperature", "max_new_tokens"):
            value = getattr(sampled, name)
            own = getattr(getattr(config, role), name, value)
            if own != value:
                yield f"{role}.{name} {own} differs from gconfig.{name} {value}, with which was sampled; leave it out"
    if rollout.consumer_batch_size != batch:
        yield (
            f"rollout.consumer_batch_size {rollout.consumer_batch_size} differs from train_dataset.batch_size {batch}, the "
            "prompts of a step; leave it out"
        )
    if rollout.use_lora != config.actor.use_lora:
        yield "rollout.use_lora differs from actor.use_lora: rollout generates with what is trained; leave it out"
    if rollout.lora_name != sampled.lora_name:
        yield f"rollout.lora_name {rollout.lora_name!r} differs from gconfig.lora_name {sampled.lora_name!r}; leave it out"
    if config.eval_gconfig is not None and config.valid_dataset is None:
        yield "eval_gconfig has no effect without valid_dataset; give that too"
    for name in ("gconfig", "eval_gconfig"):
        if getattr(config, name) is not None and not config.actor.use_lora:
            yield from at(
                name, idle(getattr(config, name), ("lora_name",), "without an adapter; set actor.use_lora too")
            )


def _groups(config: PPOConfig) -> Iterator[str]:
    samples = config.gconfig.n_samples
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(config.actor, name)
        if norm is None or "group" not in (norm.mean_level, norm.std_level):
            continue
        if norm.group_size != samples:
            yield (
                f"actor.{name}.group_size {norm.group_size} is not gconfig.n_samples {samples}, so that groups would mix "
                "prompts; leave it out"
            )
        if samples == 1 and norm.mean_level == "group":
            yield (
                f"actor.{name}.mean_level group compares the answers to one prompt, and gconfig.n_samples is 1; give at "
                "least 2, or use mean_level batch"
            )
    rows = samples * config.train_dataset.batch_size
    for role, engine in (("actor", config.actor), ("critic", config.critic)):
        if engine is not None and engine.ppo_n_minibatches > rows:
            yield (
                f"{role}.ppo_n_minibatches {engine.ppo_n_minibatches} is more than the {rows} rows of a step "
                f"(train_dataset.batch_size x gconfig.n_samples); give at most {rows}"
            )
    low, high = config.success_rate_lb, config.success_rate_ub
    if low is not None and high is not None and low > high:
        yield f"success_rate_lb {low} is above success_rate_ub {high}, which would leave out every prompt; exchange them"


def _rollout(config: PPOConfig) -> Iterator[str]:
    agent, path = config.rollout.agent, getattr(config.workflow, "path", "")  # a subclass may have its own `workflow`
    if agent.agent_cls_path and path not in ("", "agent", settings_of(WorkflowConfig)["path"].default):
        yield (
            f"rollout.agent.agent_cls_path {agent.agent_cls_path!r} and workflow.path {path!r} both say what makes a "
            "trajectory; leave one of the two out"
        )
    if path == "agent" and not agent.agent_cls_path:
        yield "workflow.path agent needs rollout.agent.agent_cls_path; give the agent as file.py:NAME or module.NAME"
    ahead = config.rollout.max_head_offpolicyness
    if config.async_training is not None and config.async_training != (ahead > 0):
        yield (
            f"async_training {shown(config.async_training)} contradicts rollout.max_head_offpolicyness {ahead}, which says "
            "how far rollout runs ahead (0 is synchronous); remove async_training"
        )


def _strategies(config: PPOConfig) -> Iterator[str]:
    """Whose devices a role may share: rollout and actor each other's; the others live in the actor's processes."""
    for role, partner in {"rollout": "actor", "actor": "rollout", "ref": "actor", "critic": "actor"}.items():
        engine = getattr(config, role)
        if engine is None or engine.scheduling_strategy.type != "colocation":
            continue
        where, strategy = f"{role}.scheduling_strategy", engine.scheduling_strategy
        if strategy.target not in (None, "", partner):
            yield f"{where}.target {strategy.target!r}: {role} shares the devices of {partner}; write {where}.target={partner}"
        if not strategy.fork and role in ("actor", "rollout") and not same_layout(config):
            yield (
                f"{where}.fork false lets the actor's engine generate, in turn with training, so both need the same layout; "
                f"rollout.backend {config.rollout.backend} and actor.backend {config.actor.backend} differ"
            )


def _teacher(config: PPOConfig) -> Iterator[str]:
    """A teacher is scored by the actor's engine, so that its own sections may only repeat what others say."""
    if config.teacher is None:
        return
    if is_address(config.teacher.path) and config.gconfig.temperature != 1:
        yield (
            f"teacher.path={config.teacher.path}: a server scores at temperature 1, and gconfig.temperature is "
            f"{config.gconfig.temperature}; set that to 1, or name the teacher's model folder"
        )
    for name in ("rollout", "train"):
        section = getattr(config.teacher, name)
        for path, entry, value in walk(section) if section is not None else ():
            key = path.rpartition(".")[2]
            same = [entry.default, config.teacher.path, config.cluster.fileroot]
            same += [getattr(part, key, None) for part in (config, config.actor, config.rollout, config.gconfig)]
            agrees = value in same or key in ("consumer_batch_size", "max_concurrent_rollouts", "temperature")
            if not entry.is_section and not agrees:
                yield (
                    f"teacher.{name}.{path} {shown(value)} has no effect: the actor's engine scores for the teacher; leave "
                    "it out"
                )


def _refusals(config: BaseExperimentConfig) -> Iterator[str]:
    """What a configuration asks for that is not supported: one message per section and reason."""
    refused: dict[tuple[str, str], list[str]] = {}
    for path, entry, value in walk(config):
        if words := entry.refusal(value):
            where, _, name = path.rpartition(".")
            text = f"{name}={value}" if isinstance(value, str | int | float) else name
            refused.setdefault((where, words), []).append(text)
    for (where, words), names in refused.items():
        yield f"{where + ': ' if where else ''}{', '.join(names)}: {words}"
