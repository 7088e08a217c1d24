"""Lists the statistics of experiments with their meanings. ``docs/statistics.md`` is generated from this list.

The logger also exports some statistics under shorter names; see :data:`SHORT_NAMES` and :data:`MEANS`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Exported = Literal["avg, min, max", "number"]
"""What a statistic exports: the numbers ``name/avg``, ``name/min`` and ``name/max``, or one number named ``name``."""

MEANS = tuple(f"{kind}/{name}" for kind in ("rollout", "eval-rollout") for name in ("reward", "num_turns"))
"""Statistics whose mean is also exported without the suffix ``/avg``."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """An entry of ``docs/statistics.md``: a statistic that ``areno run`` records."""

    name: str  # full name
    exported: Exported
    meaning: str  # description with the unit

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the exported numbers, such as ``name/avg``; see :data:`Exported`."""
        return (
            (self.name,)
            if self.exported == "number"
            else tuple(f"{self.name}/{part}" for part in ("avg", "min", "max"))
        )


SHORT_NAMES = {
    "ppo_actor/importance_weight": "ppo_actor/update/importance_weight",
    "ppo_actor/actor_clip_ratio": "ppo_actor/update/clip_ratio",
    "ppo_actor/actor_loss": "ppo_actor/update/actor_loss",
}
"""Maps shorter names to the names under which statistics are recorded."""

_Rows = tuple[tuple[str, str], ...]

_ROLLOUT: _Rows = (
    ("reward", "reward of each response"),
    ("num_turns", "number of model turns in the episode of each response (not for single-turn workflows)"),
)
_EPISODES: _Rows = (
    (
        "accepted",
        "cumulative number of finished prompts that count neither as rejected nor as stale, including prompts that wait for a "
        "later batch",
    ),
    (
        "rejected",
        "cumulative number of prompts for which an episode failed, all episodes returned None, or the filter rejected "
        "the group",
    ),
    ("failed", "cumulative number of prompts whose workflow raised an error"),
    ("filtered", "cumulative number of prompts whose group of samples the filter rejected"),
    ("stale", "cumulative number of prompts whose episodes became too stale before training used them"),
)
_LAG: _Rows = (("staleness", "staleness of the oldest token of each episode, in weight versions"),)
_EVALUATED: _Rows = (
    ("accepted", "number of prompts in this evaluation whose episodes finished, regardless of the reward"),
    (
        "rejected",
        "number of prompts in this evaluation for which an episode raised an error or all episodes returned None",
    ),
    (
        "n_prompts",
        "number of prompts over which the means of this evaluation are computed; the value equals `accepted`",
    ),
)
_EVALUATED_LENGTH: _Rows = (("seq_len", "length of each sequence (prompt and response), in tokens"),)
_BATCH: _Rows = (
    ("task_reward", "reward of each response, which should rise during training"),
    ("advantages", "advantage of each trained token, after normalization"),
    ("kl_rewards", "KL reward of each sample: -kl_ctl times the sum of the KL estimates of its trained tokens"),
    (
        "final_reward",
        "reward of each response after overlong penalty, bias, scaling, clipping and normalization, plus kl_rewards",
    ),
    ("no_eos_ratios", "1 for a truncated response, 0 for a complete one"),
    ("prompt_len", "length of each prompt, in tokens"),
    ("seq_len", "length of each sequence (prompt and response), in tokens"),
    ("correct_seq_len", "length of each sequence with a reward above 0, in tokens"),
    ("incorrect_seq_len", "length of each sequence with a reward of 0 or less, in tokens"),
)
_BATCH_COUNTS: _Rows = (
    ("n_seqs", "number of sequences in the step"),
    ("correct_n_seqs", "number of sequences with a reward above 0"),
    ("incorrect_n_seqs", "number of sequences with a reward of 0 or less"),
    ("n_tokens", "number of tokens in the step, including prompts"),
    ("n_valid_tokens", "number of trained tokens"),
    ("eps_clip", "distance of the lower clip bound from 1"),
    ("c_clip", "dual-clip bound (not reported without dual clipping)"),
    ("use_dual_clip", "1 with dual clipping, else 0"),
    ("mask_no_eos_with_zero", "1 if truncated responses get no task reward and are excluded from training, else 0"),
    ("rs_upper", "value of rejection_sampling.upper (not reported without rejection sampling)"),
    (
        "rs_lower",
        "value of rejection_sampling.lower (reported only if it is set and rejection_sampling.action is mask)",
    ),
)
_UPDATE: _Rows = (
    (
        "importance_weight",
        "importance ratio of each token relative to the behavior policy, near 1. With a decoupled loss or recompute_logprob, "
        "the ratio is relative to the proximal policy (the policy at the start of the update)",
    ),
    (
        "approx_kl",
        "logarithm of the token-level importance ratio; the negative of its mean is a k1 estimate of the KL divergence",
    ),
    ("new_logp", "log-prob of each trained token under the policy"),
    (
        "old_logp",
        "log-prob of each trained token under the behavior policy, recorded during sampling. With recompute_logprob and "
        "without a decoupled loss, old_logp is instead recomputed under the policy at the start of the update",
    ),
    ("entropy", "entropy of the policy at each trained token, in nats"),
    ("actor_loss", "policy loss; its value does not show whether training succeeds"),
    (
        "clip_ratio",
        "fraction of clipped tokens among the trained tokens not masked by rejection sampling or M2PO; normally below 0.1",
    ),
    (
        "dual_clip_ratio",
        "fraction of tokens whose loss is limited by the dual clip (tokens masked by rejection sampling or M2PO do not count)",
    ),
    (
        "behave_imp_weight",
        "probability under the proximal policy divided by probability under the behavior policy, for each token not masked "
        "by rejection sampling or M2PO. With rejection_sampling.action=clamp, the reported ratio is already clamped to the "
        "bounds",
    ),
    (
        "behave_approx_kl",
        "log-prob under the proximal policy minus log-prob under the behavior policy, for each token not masked "
        "by rejection sampling or M2PO",
    ),
    ("clipped_new_logp", "new_logp of the clipped tokens"),
    ("clipped_old_logp", "old_logp of the clipped tokens"),
    ("vocab_min_logits", "minimum logit over the vocabulary at each trained token, before division by the temperature"),
    ("vocab_max_logits", "maximum logit over the vocabulary at each trained token, before division by the temperature"),
    ("rkl_loss", "with distillation: k1 estimate of the reverse KL divergence to the teacher, per token"),
    (
        "sapo_soft_gate",
        "with SAPO: sigmoid(tau (importance_weight - 1)) of each token, where tau is sapo_tau_pos if the advantage is above 0, "
        "else sapo_tau_neg",
    ),
    (
        "sapo_scaled_gate_pos",
        "with SAPO, for each token with an advantage above 0: sapo_soft_gate times 4 / sapo_tau_pos. The loss multiplies the "
        "advantage by this factor",
    ),
    (
        "sapo_scaled_gate_neg",
        "with SAPO, for each token with an advantage of 0 or less: sapo_soft_gate times 4 / sapo_tau_neg. The loss multiplies "
        "the advantage by this factor",
    ),
)
_UPDATE_COUNTS: _Rows = (
    ("unclipped_behave_tokens", "number of trained tokens not masked by rejection sampling or M2PO"),
    (
        "clipped_tokens",
        "number of clipped tokens among the trained tokens not masked by rejection sampling or M2PO",
    ),
    (
        "rs_filtered_fraction",
        "fraction of trained tokens masked by rejection sampling. With rejection_sampling.action=clamp, fraction of trained "
        "tokens with a clamped importance weight",
    ),
    ("kl_loss", "with kl_loss_coef above 0: mean KL divergence to the reference, per trained token"),
    ("kl_coef", "value of kl_loss_coef (not reported if it is 0)"),
    ("grad_norm", "gradient norm before clipping"),
    ("lr", "learning rate"),
    ("update_successful", "fraction of the step's updates with a finite gradient; areno skips the other updates"),
    (
        "num_micro_batches",
        "number of microbatches per optimizer step on all data-parallel replicas together, averaged over the optimizer steps",
    ),
)
_LOGP: _Rows = (
    (
        "prox_logp_gt",
        "exact log-prob of each trained token under the proximal policy (the policy at the start of the update), computed in "
        "an additional forward pass",
    ),
    ("kl_div_direct", "k1 estimate of KL(behavior policy, proximal policy), per token"),
    ("kl_div_taylor", "k2 estimate of KL(behavior policy, proximal policy), per token"),
    ("kl_div_dual", "k3 estimate of KL(behavior policy, proximal policy), per token"),
)


def _approximated(method: str) -> _Rows:
    return (
        (
            "approx_logp",
            "approximate log-prob of each trained token under the proximal policy (the policy at the start of the update), "
            f"computed as with prox_logp_method={method}",
        ),
        (
            "behave_imp_weight",
            "exp(approx_logp - old_logp) of each trained token, which approximates the importance ratio of the proximal policy "
            "relative to the behavior policy",
        ),
        (
            "importance_weight",
            "exp(new_logp - approx_logp) of each trained token, which approximates the importance ratio of the current policy "
            "relative to the proximal policy",
        ),
        (
            "abs_error",
            "error of the approximate log-prob under the proximal policy: abs(approx_logp - prox_logp_gt), where prox_logp_gt "
            "is the exact log-prob",
        ),
        ("rel_error", "abs_error divided by abs(prox_logp_gt), where prox_logp_gt is the exact log-prob"),
        ("squared_error", "square of abs_error"),
        (
            "behave_imp_weight_abs_error",
            "absolute difference between behave_imp_weight and the exact ratio, exp(prox_logp_gt - old_logp)",
        ),
        (
            "behave_imp_weight_rel_error",
            "behave_imp_weight_abs_error divided by the exact ratio, exp(prox_logp_gt - old_logp)",
        ),
        (
            "importance_weight_abs_error",
            "absolute difference between importance_weight and the exact ratio, exp(new_logp - prox_logp_gt)",
        ),
        (
            "importance_weight_rel_error",
            "importance_weight_abs_error divided by the exact ratio, exp(new_logp - prox_logp_gt)",
        ),
    )


_VERSIONS: _Rows = (
    *(
        (
            f"sample_staleness_{policy}_{part}",
            f"{statistic} staleness of the trained tokens: the weight version {when} this update, minus the weight version "
            "that sampled the token",
        )
        for policy, when in (("proximal", "before"), ("theta", "after"))
        for part, statistic in (("avg", "mean"), ("max", "maximum"), ("min", "minimum"))
    ),
    ("v_theta", "weight version that the update produces"),
    ("v_proximal", "weight version of the proximal policy"),
    ("n_valid_generated_tokens", "number of trained tokens with a recorded weight version"),
)
_CRITIC: _Rows = (
    ("new_value", "predicted value during the update, per trained token"),
    ("old_value", "predicted value before the update"),
    ("target_value", "regression target of the value"),
    ("critic_loss", "value loss"),
    ("clip_ratio", "fraction of trained tokens whose predicted value is clipped"),
)
_SFT: _Rows = (("loss", "negative log-prob of each trained token, in nats"), ("ppl", "perplexity of each sequence"))
_SFT_COUNTS: _Rows = (
    ("n_seqs", "number of sequences in the step"),
    ("n_tokens", "number of tokens in the step"),
    ("n_valid_tokens", "number of trained tokens"),
    ("prompt_tokens", "number of prompt tokens"),
)
_RW: _Rows = (
    ("correct_ratio", "1 for a pair whose chosen response has the higher score, else 0"),
    ("pos_score", "score of chosen responses"),
    ("neg_score", "score of rejected responses"),
    ("loss", "pairwise loss"),
)
_DPO: _Rows = (
    ("loss", "pairwise loss"),
    ("chosen_reward", "implicit reward of chosen responses: beta times the log-ratio of policy to reference"),
    ("rejected_reward", "implicit reward of rejected responses: beta times the log-ratio of policy to reference"),
    ("reward_accuracy", "1 for a pair whose chosen response has the higher implicit reward, else 0"),
    ("reward_margin", "implicit reward of the chosen response minus that of the rejected response"),
)
_TIMES: _Rows = (
    ("step", "time of the whole step, excluding saving and evaluation"),
    ("rollout", "time spent waiting for a batch of episodes"),
    ("rollout_pause", "longest pause of a replica's generation during the weight update"),
    ("recompute_logp", "time to compute the policy's log-probs before the update"),
    ("ref_logp", "time to compute the reference's log-probs"),
    ("teacher_logp", "time to compute the teacher's log-probs"),
    ("critic_values", "time to compute the critic's values"),
    ("compute_advantage", "time to compute the advantages"),
    ("train_step", "time of the actor update"),
    ("critic_train_step", "time of the critic update"),
    ("update_weights", "time to transfer new weights to the rollout"),
    ("save", "time to save the models; with asynchronous saving, only the time to copy the models"),
    ("checkpoint_for_recover", "time to write a recovery checkpoint"),
    ("eval", "time of the evaluation"),
)
_MEMORY: _Rows = (
    ("peak_resident_gib", "peak resident memory so far, summed over the run's processes on this machine, in GiB"),
    (
        "available_gib",
        "memory that is available after the step, in GiB: the smaller of the machine's free memory and the "
        "unused part of the cgroup limit",
    ),
    (
        "peak_gpu_gib",
        "with GPUs: peak memory of the trainer's tensors so far, on the GPU with the highest peak, in GiB",
    ),
)

SECTIONS: tuple[tuple[str, str, Exported, _Rows], ...] = (
    ("Rollout", "rollout", "avg, min, max", _ROLLOUT),
    ("Rollout", "rollout", "avg, min, max", _LAG),
    ("Rollout", "rollout", "number", _EPISODES),
    ("Evaluation", "eval-rollout", "avg, min, max", _ROLLOUT),
    ("Evaluation", "eval-rollout", "avg, min, max", _EVALUATED_LENGTH),
    ("Evaluation", "eval-rollout", "number", _EVALUATED),
    ("The batch", "ppo_actor", "avg, min, max", _BATCH),
    ("The batch", "ppo_actor", "number", _BATCH_COUNTS),
    ("The actor's update", "ppo_actor/update", "avg, min, max", _UPDATE),
    ("The actor's update", "ppo_actor/update", "number", _UPDATE_COUNTS),
    ("Proximal log-probs", "ppo_actor/update/compute_logp", "avg, min, max", _LOGP),
    *(
        ("Proximal log-probs", f"ppo_actor/update/compute_logp/{method}", "avg, min, max", _approximated(method))
        for method in ("loglinear", "linear", "rollout")
    ),
    ("Staleness", "ppo_actor/update/version_stats", "number", _VERSIONS),
    ("The critic's update", "ppo_critic", "avg, min, max", _CRITIC),
    ("SFT", "sft", "avg, min, max", _SFT),
    ("SFT", "sft", "number", _SFT_COUNTS),
    ("Reward model", "rw", "avg, min, max", _RW),
    ("Reward model", "rw", "number", (("n_pairs", "number of pairs of a chosen and a rejected response in the step"),)),
    ("DPO and IPO", "dpo", "avg, min, max", _DPO),
    ("Seconds", "timeperf", "number", _TIMES),
    ("Memory", "memory", "number", _MEMORY),
)
"""Sections of the list of statistics.

Each section has a title, the prefix of its statistics' names, the exported numbers (see :data:`Exported`), and the name
(without prefix) and the meaning of each statistic.
"""


def documented() -> Iterator[tuple[str, Statistic]]:
    """Yield each statistic with the title of its section."""
    for title, scope, exported, rows in SECTIONS:
        for name, meaning in rows:
            yield title, Statistic(f"{scope}/{name}", exported, meaning)


def with_short_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers, with copies of some statistics under shorter names (see :data:`SHORT_NAMES` and :data:`MEANS`)."""
    aliases = {
        f"{short}{end}": numbers[f"{full}{end}"]
        for short, full in SHORT_NAMES.items()
        for end in ("", "/avg", "/min", "/max")
        if f"{full}{end}" in numbers
    }
    aliases |= {name: numbers[f"{name}/avg"] for name in MEANS if f"{name}/avg" in numbers}
    return {**numbers, **aliases}
