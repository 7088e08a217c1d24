"""Settings that would silently go wrong are refused: contradictions, wrong groups, unsupported features."""

from __future__ import annotations

import pytest

from areno.config.experiment import DPOConfig, RWConfig, SFTConfig, config_from
from areno.errors import UsageError
from tests.config.experiment.samples import DPO, RL, RW, SFT, accepted, changed, refused, rl

VALID = {"valid_dataset.path": "held.jsonl", "valid_dataset.type": "rl", "evaluator.freq_steps": 5}
TEACHER = {"teacher.path": "a/teacher", "teacher.rollout": {}}
DECOUPLED = {"actor.use_decoupled_loss": True, "actor.rejection_sampling": {}}


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        # names
        ({"experiment_name": "a_b"}, "experiment_name 'a_b' must not contain '_'", {"experiment_name": "a-b"}),
        ({"trial_name": "a-b"}, "write a_b", {"trial_name": "a_b"}),
        ({"trial_name": "a/b"}, "must not contain '/'", {"trial_name": "a_b"}),
        # pitfalls of the loss
        ({"actor.kl_ctl": 0.1}, "actor.kl_ctl 0.1 needs a reference", {"actor.kl_ctl": 0.0}),
        ({"actor.kl_ctl": 0.1}, "the section ref is missing", {"actor.kl_ctl": 0.1, "ref": {}}),
        (
            {"actor.kl_loss_coef": 0.1},
            "actor.kl_loss_coef 0.1 needs a reference",
            {"actor.kl_loss_coef": 0.1, "ref": {}},
        ),
        ({"actor.kl_loss_type": "k2"}, "with kl_loss_coef 0", {}),
        (
            {"actor.kl_loss_coef": 0.1, "ref": {}, "actor.algorithm": "gmpo"},
            "whose loss has no KL term",
            {"actor.algorithm": "gmpo"},
        ),
        ({"actor.rejection_sampling": {}}, "without use_decoupled_loss", DECOUPLED),
        (
            DECOUPLED | {"actor.prox_logp_method": "loglinear", "actor.recompute_logprob": True},
            "actor.recompute_logprob has no effect",
            DECOUPLED | {"actor.prox_logp_method": "loglinear"},
        ),
        (
            DECOUPLED | {"actor.use_sapo_loss": True},
            "cannot be combined with use_decoupled_loss",
            {"actor.use_sapo_loss": True, "actor.sapo_tau_pos": 2.0},
        ),
        ({"actor.sapo_tau_neg": 2.0}, "without SAPO", {"actor.sapo_tau_neg": 2.0, "actor.use_sapo_loss": True}),
        (
            {"actor.use_sapo_loss": True, "actor.eps_clip_higher": 0.3},
            "does not clip",
            {"actor.use_sapo_loss": True, "actor.eps_clip": 0.3},
        ),
        (
            {"actor.use_sapo_loss": True, "actor.use_cispo_loss": True},
            "mutually exclusive",
            {"actor.use_cispo_loss": True},
        ),
        ({"actor.m2_threshold": 0.04}, "set use_decoupled_loss", {"actor.m2_threshold": 0.04} | DECOUPLED),
        (
            {"actor.overlong_reward_penalty": True},
            "actor.overlong_tokens is missing",
            {
                "actor.overlong_reward_penalty": True,
                "actor.overlong_tokens": 8,
                "actor.overlong_penalty_factor": 1.0,
            },
        ),
        ({"actor.overlong_tokens": 8}, "without overlong_reward_penalty", {}),
        ({"actor.kl_estimator": "k2"}, "with kl_ctl 0", {"actor.kl_estimator": "k2", "ref": {}}),
        ({"actor.target_modules": ["q_proj"]}, "actor.target_modules has no effect without an adapter", {}),
        # reward parts
        ({"reward.weights": {"a": -1}}, "reward.weights 'a=-1' is not a valid weight", {"reward.weights": {"a": 0}}),
        ({"reward.weights": {"a": "b"}}, "reward.weights 'a=b' is not a valid weight", {"reward.weights": {"a": 0.5}}),
        ({"reward.weights": {"1 a": 1}}, "reward.weights '1 a=1' is not a valid weight", {}),
        # reward models
        (
            {"reward.path": "m", "reward.weights": {"a": 1}},
            "reward.weights {'a': 1} has no effect with reward.path",
            {"reward.path": "m"},
        ),
        (
            {"reward.path": "m", "reward.fn": "r.py:f"},
            "reward.fn r.py:f has no effect with reward.path",
            {"reward.path": "m"},
        ),
        (
            {"reward.path": "m", "workflow.path": "multi_turn"},
            "multi_turn, which computes rewards itself",
            {"reward.path": "m"},
        ),
        (
            {"reward.path": "m", "success_rate_lb": 0.1},
            "the reward model (reward.path) computes the rewards only after the last episode",
            {"success_rate_lb": 0.1},
        ),
        # rejection sampling
        (DECOUPLED | {"actor.rejection_sampling.lower": 6.0}, "is above upper", DECOUPLED),
        (DECOUPLED | {"actor.rejection_sampling.upper": 0.9}, "use a bound above 1", DECOUPLED),
        (DECOUPLED | {"actor.rejection_sampling.lower": 0.0}, "always positive", DECOUPLED),
        (
            DECOUPLED | {"actor.rejection_sampling": {"metric": "kl_k3", "upper": 0.0}},
            "because kl_k3 is then positive",
            DECOUPLED | {"actor.rejection_sampling": {"metric": "kl_k1", "upper": 0.0}},
        ),
        (
            DECOUPLED | {"actor.rejection_sampling": {"metric": "kl_k2", "action": "clamp"}},
            "set action=mask",
            DECOUPLED | {"actor.rejection_sampling": {"action": "clamp"}},
        ),
        (
            DECOUPLED | {"actor.rejection_sampling.agg": "max"},
            "set level to sequence",
            DECOUPLED | {"actor.rejection_sampling": {"agg": "max", "level": "sequence"}},
        ),
        # sampling
        ({"gconfig.greedy": True}, "the same answer each time", {"gconfig.greedy": True, "gconfig.n_samples": 1}),
        (
            {"eval_gconfig": {"greedy": True, "top_p": 0.5}} | VALID,
            "with greedy",
            {"eval_gconfig": {"greedy": True}} | VALID,
        ),
        ({"gconfig.min_new_tokens": 65}, "above max_new_tokens", {"gconfig.min_new_tokens": 64}),
        (
            {"rollout.on_stale": "regenerate"},
            "set max_staleness",
            {"rollout.on_stale": "regenerate", "rollout.max_staleness": 2},
        ),
        # evaluation
        ({"evaluator.freq_steps": 5}, "evaluator has no data", VALID),
        ({"eval_gconfig": {}}, "without valid_dataset", {"eval_gconfig": {}} | VALID),
        (VALID | {"valid_dataset.type": "sft"}, "make the two types equal", VALID),
        # engines
        ({"actor.optimizer": None}, "nothing would be trained", {}),
        ({"critic": {}}, "the critic would not be trained", {"critic.optimizer.lr": 1e-4}),
        (
            {"ref": {"gradient_checkpointing": True}},
            "ref.gradient_checkpointing true has no effect: ref runs in the actor's engine",
            {"ref": {"optimizer": "${actor.optimizer}"}},
        ),
        ({"ref": {"eps_clip": 0.3}}, "ref.eps_clip 0.3 has no effect", {"ref": "${actor}"}),
        ({"actor.attn_impl": "sdp"}, "did you mean sdpa?", {"actor.attn_impl": "sdpa"}),
        ({"actor.attn_impl": "owner/kernel@main:entry"}, "is not supported", {"actor.attn_impl": "eager"}),
        ({"actor.lora_rank": 8}, "set use_lora", {}),
        (
            {"actor": RL["actor"] | {"use_lora": True, "target_modules": ["linear_qkv"]}},
            "contains names of Megatron layers (linear_qkv); write [q_proj, k_proj",
            {"actor": RL["actor"] | {"use_lora": True, "target_modules": ["q_proj"]}},
        ),
        (
            {"actor.enable_tree_training": True, "actor.mb_spec.packing_algorithm": "kk"},
            "set mb_spec.packing_algorithm to ffd",
            {"actor.enable_tree_training": True},
        ),
        (
            {"actor.mb_spec.n_mbs": None},
            "is null too, so the number",
            {"actor.mb_spec": {"n_mbs": None, "max_tokens_per_mb": 64}},
        ),
        (
            {"actor.optimizer.min_lr_ratio": 0.1},
            "use linear or cosine",
            {"actor.optimizer": {"min_lr_ratio": 0.1, "lr_scheduler_type": "cosine"}},
        ),
        ({"actor.optimizer": {"type": "sgd", "beta1": 0.5}}, "with type sgd", {"actor.optimizer.type": "sgd"}),
        ({"actor.scheduling_spec": []}, "has 0 entries; use 1 or 2", {"actor.scheduling_spec": [{}, {}]}),
        ({"rollout.agent.scheduling_spec": [{}, {}]}, "has 2 entries; use 1", {}),
        (
            {"actor.scheduling_strategy.type": "colocation"},
            "set the role",
            {"actor.scheduling_strategy": {"type": "colocation", "target": "rollout"}},
        ),
        (
            {"rollout.agent.subproc_max_workers": 2},
            "set mode to subproc",
            {"rollout.agent": {"mode": "subproc", "subproc_max_workers": 2}},
        ),
        (
            {"workflow.path": "agent"},
            "needs an agent; set rollout.agent.agent_cls_path",
            {"workflow.path": "agent", "rollout.agent.agent_cls_path": "a.py:B"},
        ),
        # normalization
        (
            {"actor.adv_norm": {"mean_level": None, "mean_leave1out": True}},
            "without a mean",
            {"actor.adv_norm": {"mean_level": None}},
        ),
        (
            {"actor.adv_norm": {"std_level": None, "eps": 0.1}},
            "without a standard deviation",
            {"actor.adv_norm": {"std_level": None}},
        ),
        ({"actor.adv_norm": {"mean_level": None, "std_level": None}}, "nothing is normalized", {}),
        ({"actor.ppo_n_minibatches": 33}, "more than 32, the number of rows per step", {"actor.ppo_n_minibatches": 32}),
        (
            {"success_rate_lb": 0.9, "success_rate_ub": 0.1},
            "swap the two values",
            {"success_rate_lb": 0.1, "success_rate_ub": 0.9},
        ),
        (
            {"saver": {"mode": "off", "freq_steps": 2}},
            "freq_steps 2 has no effect with mode off",
            {"saver.mode": "off"},
        ),
        # teacher
        (
            TEACHER | {"teacher.train": {}},
            "teacher.train has no effect",
            {"teacher": {"engine_type": "train", "train": {}, "path": "x"}},
        ),
        ({"teacher": {"rollout": {}}}, "teacher.path is missing", TEACHER),
        (
            TEACHER | {"teacher.rl_loss_weight": 0.0, "teacher.distill_loss_weight": 0.0},
            "nothing is learned",
            TEACHER,
        ),
        # kind of experiment
        ({"train_dataset.type": "sft"}, "is for SFTConfig, but the experiment is a GRPOConfig", {}),
        ({"train_dataset.type": "rll"}, "did you mean rl?", {}),
    ],
)
def test_a_contradiction_is_refused_and_its_remedy_accepted(changes, words, remedy):
    text = refused(changes)
    assert words in text
    accepted(remedy)


def test_the_lower_bound_of_clamping_defaults_to_zero():
    config = rl(actor__use_decoupled_loss=True, actor__rejection_sampling={"action": "clamp"})
    assert config.actor.rejection_sampling is not None
    assert config.actor.rejection_sampling.lower == 0.0


def test_when_a_forward_pass_is_needed_before_the_update():
    wanted = {
        (False, False, "recompute"): False,
        (True, False, "recompute"): True,
        (False, True, "recompute"): True,
        (False, True, "metrics"): True,
        (False, True, "loglinear"): False,
    }
    for (recompute, decoupled, method), expected in wanted.items():
        changes: dict = {"actor.recompute_logprob": recompute}
        if decoupled:
            changes |= DECOUPLED | {"actor.prox_logp_method": method}
        assert accepted(changes).actor.should_compute_prox_logp() is expected


@pytest.mark.parametrize("name", ["experiment_name", "trial_name"])
@pytest.mark.parametrize(
    "section", ["actor", "rollout", "saver", "evaluator", "recover", "stats_logger", "perf_tracer"]
)
def test_a_section_cannot_override_the_experiment_or_trial_name(section, name):
    assert f"{section}.{name} 'other' differs from {name}" in refused({f"{section}.{name}": "other"})
    accepted({f"{section}.{name}": RL[name]})


def test_only_checkpoints_may_use_a_different_fileroot():
    for section in ("evaluator", "stats_logger", "perf_tracer", "rollout"):
        assert "only saver.fileroot and recover.fileroot may differ" in refused({f"{section}.fileroot": "/other"})
    config = accepted({"saver.fileroot": "/big", "recover.fileroot": "/fast"})
    assert (config.saver.fileroot, config.recover.fileroot) == ("/big", "/fast")


def test_actor_settings_must_agree_with_gconfig():
    assert "actor.max_new_tokens 65 differs from gconfig.max_new_tokens 64" in refused({"actor.max_new_tokens": 65})
    assert "actor.temperature 0.5 differs" in refused({"actor.temperature": 0.5})
    assert "ref.temperature 0.5 differs" in refused({"ref.temperature": 0.5})
    assert accepted({"gconfig.temperature": 0.5}).actor.temperature == 0.5
    with pytest.raises(UsageError, match=r"actor\.temperature 0\.7 has no effect in an experiment without rollouts"):
        config_from(changed(SFT, {"actor.temperature": 0.7}), SFTConfig)


def test_consumer_batch_size_must_equal_the_batch_size():
    assert "differs from train_dataset.batch_size 8" in refused({"rollout.consumer_batch_size": 4})
    assert accepted({"train_dataset.batch_size": 16}).rollout.consumer_batch_size == 16


def test_adapter_settings_of_rollout_must_match_the_actor():
    assert accepted({"actor.use_lora": True, "gconfig.lora_name": "mine"}).rollout.use_lora is True
    assert accepted({"actor.use_lora": True, "gconfig.lora_name": "mine"}).rollout.lora_name == "mine"
    assert "gconfig.lora_name mine has no effect without an adapter" in refused({"gconfig.lora_name": "mine"})
    assert "differs from actor.use_lora" in refused({"rollout.use_lora": True})
    assert "differs from gconfig.lora_name" in refused({"rollout.lora_name": "other"})


def test_the_group_size_of_normalization_is_n_samples():
    group = {"actor.reward_norm": {"mean_level": "group", "std_level": "group"}}
    assert accepted(group).actor.reward_norm.group_size == 4
    assert "differs from gconfig.n_samples 4" in refused(group | {"actor.reward_norm.group_size": 2})
    assert "gconfig.n_samples is 1" in refused(group | {"gconfig.n_samples": 1})
    accepted({"actor.adv_norm": {"group_size": 2}})  # batch level has no groups


def test_is_critic_must_match_the_role():
    assert "actor.is_critic is true, but actor must be a policy" in refused({"actor.is_critic": True})
    assert "actor.is_critic=false" in refused({"actor.is_critic": True}, DPO, DPOConfig)
    assert "actor.is_critic=true" in refused({"actor.is_critic": False}, RW, RWConfig)
    assert "critic.is_critic=true" in refused({"critic": {"is_critic": False, "optimizer": {}}})
    assert "ref.is_critic=false" in refused({"ref.is_critic": True})


def test_a_preference_algorithm_by_name_uses_no_reference():
    named = {"actor.algorithm": "simpo", "ref": {}}
    assert accepted(named, DPO, DPOConfig).ref.path == DPO["actor"]["path"]
    assert "ref.path other has no effect" in refused(named | {"ref.path": "other"}, DPO, DPOConfig)
    assert "actor.beta has no effect" in refused(named | {"actor.beta": 0.2}, DPO, DPOConfig)
    assert "actor.algorithm gspo needs a different trainer" in refused({"actor.algorithm": "gspo"}, DPO, DPOConfig)


def test_weight_update_mode_is_refused_without_rollout():
    assert "without rollouts" in refused({"actor.weight_update_mode": "disk"}, SFT, SFTConfig)
    accepted({"actor.weight_update_mode": "disk"})


def test_allocation_mode_sets_the_backend_of_each_role():
    base = changed(RL, {"rollout": {}})
    base["actor"] = {key: value for key, value in RL["actor"].items() if key != "backend"}
    config = accepted({"allocation_mode": "areno:d2+fsdp:d2t2"}, base)
    assert (config.rollout.backend, config.actor.backend) == ("areno:d2", "fsdp:d2t2")
    config = accepted({"allocation_mode": "areno[rollout]:d2|fsdp[actor]:d2", "actor.weight_update_mode": "disk"}, base)
    assert (config.actor.scheduling_strategy.type, config.actor.scheduling_strategy.target) == ("colocation", "rollout")
    config = accepted({"allocation_mode": "areno.d2m1+d1m2"}, base)
    assert (config.rollout.backend, config.actor.backend) == ("areno:d2", "fsdp:t2")
    assert "differs from areno:d2 of allocation_mode" in refused({"allocation_mode": "areno:d2+fsdp:d2"})
    assert "there is no section critic" in refused({"allocation_mode": "areno:d1+fsdp[critic]:d1"}, base)
    accepted({"allocation_mode": "areno:d1+fsdp:d1"})  # agrees with the sections
    config = accepted({"allocation_mode": "d2m2"}, base)
    assert (config.rollout.backend, config.actor.backend) == ("areno:d2t2", "fsdp:d2t2")
    assert config.actor.scheduling_strategy.target == "rollout"
    config = accepted({"allocation_mode": "actor_gen:d2,*:d4"}, base)
    assert (config.rollout.backend, config.actor.backend) == ("areno:d2", "fsdp:d4")
    without = changed(SFT, {"actor.backend": None, "allocation_mode": "d4"})
    assert accepted({}, without, SFTConfig).actor.backend == "fsdp:d4"
    assert "write allocation_mode=areno[rollout]:d4|fsdp[actor]:d4" in refused({"allocation_mode": "d2p2m1"}, base)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rollout.backend": "areno:d2p2"},
            "does not support pipeline parallelism (p2); write rollout.backend=areno:d4",
        ),
        (
            {"actor.backend": "archon:p2", "actor.use_lora": True},
            "actor.use_lora is not supported with actor.backend archon:p2: pipeline parallelism",
        ),
        (
            {"actor.backend": "megatron:p2", "rollout.scheduling_strategy.type": "colocation"}
            | {"rollout.scheduling_strategy.target": "actor", "rollout.scheduling_strategy.fork": False},
            "with actor.backend megatron:p2 the actor cannot generate",
        ),
        (
            {"actor.backend": "archon:d2", "actor.archon.fp8_config.mode": "blockwise"},
            "fp8_config.mode blockwise: FP8",
        ),
        (
            {"actor.backend": "megatron:(attn:d2t2|ffn:d4)"},
            "must be a multiple of 2 (tensor-parallel size of the other layers) and divide 4 (devices per",
        ),
        (
            {"actor.backend": "fsdp:c2t2", "actor.use_lora": True},
            "fsdp:t2c2 shards weights, which is not supported with actor.use_lora: areno cannot shard the adapters",
        ),
        ({"actor.load_in_4bit": True}, "actor.load_in_4bit true has no effect without an adapter; set use_lora too"),
        ({"actor.offload_activations": True}, "has no effect without gradient_checkpointing"),
        *(
            ({"actor.use_lora": True, "actor.load_in_4bit": True} | cut, "4-bit weights cannot be sharded")
            for cut in ({"actor.backend": "fsdp:t2"}, {"rollout.backend": "areno:t2"})
        ),
        (
            {"rollout.backend": "areno:t2", "rollout.speculate": 4},
            "rollout.speculate 4 is not supported with rollout.backend areno:t2",
        ),
        ({"actor.fsdp.shard_weights": True}, "with actor.backend fsdp:d1: there is only one data-parallel rank"),
        *(
            ({"actor.backend": "fsdp:d2", "actor.fsdp.shard_weights": True} | more, words)
            for more, words in (
                (
                    {"actor.use_lora": True, "actor.load_in_4bit": True},
                    "with actor.load_in_4bit: 4-bit weights cannot be sharded; remove",
                ),
            )
        ),
        ({"actor.backend": "areno:d1"}, "is only for inference; use a backend such as fsdp:d1"),
        ({"rollout.backend": "fsdp:d1"}, "is only for training; use a backend such as areno:d1"),
        ({"actor.backend": "d1"}, "write fsdp:d1 for training"),
        ({"ref.backend": "fsdp:d2"}, "ref runs on the actor's ranks"),
        ({"actor._version": "v2"}, "_version v2) are not supported"),
        ({"rollout._version": "v2"}, "_version v2) are not supported"),
        ({"cluster.n_nodes": 2}, "needs a cluster, but scheduler.type is neither ray nor slurm; set one of these"),
        ({"scheduler.type": "slurm"}, "cluster.n_gpus_per_node is null, but scheduler.type=slurm needs the number"),
        ({"scheduler.type": "ray", "cluster.name_resolve.type": "memory"}, "use nfs or etcd3"),
        (
            {"scheduler.type": "slurm", "cluster.n_gpus_per_node": 0, "cluster.name_resolve.type": "ray"},
            "name_resolve.type=ray does not work across the processes of scheduler.type=slurm",
        ),
        (
            {"scheduler.type": "ray", "actor.weight_update_mode": "shm"},
            "machines share no memory; use xccl, or use disk",
        ),
        *(
            (
                {"rollout.backend": f"{name}:d1", f"{name}.command": '/opt/"server'},
                f"{name}.command '/opt/\"server' is not a valid command line: No closing quotation; check its quotes",
            )
            for name in ("vllm", "sglang")
        ),
        ({"rollout.agent.mode": "online"}, "online) are not supported"),
    ],
)
def test_unsupported_settings_are_refused_with_a_reason(changes, words):
    text = refused(changes)
    assert words in text


def test_an_unsupported_allocation_gives_one_message():
    base = changed(RL, {"rollout": {}})
    base["actor"] = {key: value for key, value in RL["actor"].items() if key != "backend"}
    text = refused({"allocation_mode": "areno.d2p2m1+d2p2m1", "ref": {}}, base)
    assert "\n" not in text
    for part in ("pipeline parallelism (p2)", "allocation_mode=areno:d4+fsdp:d4"):
        assert part in text
    accepted({"allocation_mode": "areno:d4+megatron:d2p2"}, base)
