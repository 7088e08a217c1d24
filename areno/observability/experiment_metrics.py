"""Lists the statistics of experiments with their meaning. ``docs/statistics.md`` is generated from this table.

The logger also exports some statistics under shorter names, which ``SHORT_NAMES`` and ``MEANS`` list.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Exported = Literal["avg, min, max", "number"]
"""What a statistic exports: the numbers ``name/avg``, ``name/min`` and ``name/max``, or one number under its name."""

MEANS = tuple(f"{kind}/{name}" for kind in ("rollout", "eval-rollout") for name in ("reward", "num_turns"))
"""Statistics whose mean is also exported under the name without ``/avg``."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """A documented statistic."""

    name: str  # full name
    exported: Exported
    meaning: str  # description with the unit

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of the exported numbers."""
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
"""Maps shorter names to the recorded names."""

_Rows = tuple[tuple[str, str], ...]

_ROLLOUT: _Rows = (
    ("reward", "reward of each response"),
    ("num_turns", "model turns in the episode of each response; absent for single-turn workflows"),
)
_EPISODES: _Rows = (
    ("accepted", "prompts so far whose episodes a batch has used or may still use"),
    ("rejected", "prompts so far whose episodes failed, returned None or were filtered out"),
    ("failed", "rejected prompts whose workflow raised"),
    ("filtered", "rejected prompts whose trajectory the filter did not accept"),
    ("stale", "prompts so far whose episodes became too stale before a batch used them"),
)
_LAG: _Rows = (
    ("staleness", "number of versions between the oldest token of each episode and the weights being trained"),
)
_EVALUATED: _Rows = (
    ("accepted", "prompts of this evaluation whose episodes finished, with any reward"),
    ("rejected", "prompts of this evaluation whose episodes raised or returned None"),
    ("n_prompts", "prompts of this evaluation that the means cover; equal to accepted"),
)
_EVALUATED_LENGTH: _Rows = (("seq_len", "tokens of each sequence, prompt and response"),)
_BATCH: _Rows = (
    ("task_reward", "reward of each response; should rise"),
    ("advantages", "advantage of each trained token, after normalization"),
    ("kl_rewards", "-kl_ctl times the KL estimate to the reference, summed over the trained tokens of a sample"),
    ("final_reward", "reward of each response after penalty, bias, scaling, clip, normalization and KL"),
    ("no_eos_ratios", "1 for a truncated response, 0 for a complete one"),
    ("prompt_len", "tokens of each prompt"),
    ("seq_len", "tokens of each sequence, prompt and response"),
    ("correct_seq_len", "tokens of each sequence with a reward above 0"),
    ("incorrect_seq_len", "tokens of each sequence with any other reward"),
)
_BATCH_COUNTS: _Rows = (
    ("n_seqs", "sequences of the step"),
    ("correct_n_seqs", "sequences with a reward above 0"),
    ("incorrect_n_seqs", "sequences with any other reward"),
    ("n_tokens", "tokens of the step, including prompts"),
    ("n_valid_tokens", "trained tokens"),
    ("eps_clip", "width of the clip range below 1"),
    ("c_clip", "dual-clip bound; absent without dual clipping"),
    ("use_dual_clip", "1 if there is a dual-clip bound, else 0"),
    ("mask_no_eos_with_zero", "1 if truncated responses get no task reward and are not trained on"),
    ("rs_upper", "upper bound of rejection sampling; absent without rejection sampling"),
    ("rs_lower", "lower bound of rejection sampling; absent with clamp or without a lower bound"),
)
_UPDATE: _Rows = (
    (
        "importance_weight",
        "ratio of the policy to the behavior policy, or to the proximal policy with a decoupled loss or recompute_logprob; per "
        "token; near 1",
    ),
    ("approx_kl", "log-prob under the policy minus the log-prob that importance_weight compares it with, per token"),
    ("new_logp", "log-prob of each trained token under the policy"),
    (
        "old_logp",
        "log-prob of each trained token when sampled; with recompute_logprob and without a decoupled loss, log-prob under "
        "the proximal policy",
    ),
    ("entropy", "entropy of the policy at each trained token, in nats"),
    ("actor_loss", "the policy loss; it has no trend and does not measure success"),
    (
        "clip_ratio",
        "share of clipped tokens among those that rejection sampling and M2PO keep; mostly below 0.1",
    ),
    ("dual_clip_ratio", "share of tokens at the dual-clip bound, among those that rejection sampling and M2PO keep"),
    (
        "behave_imp_weight",
        "importance weight of a kept token: ratio of the proximal to the behavior policy, clamped if rejection sampling clamps",
    ),
    ("behave_approx_kl", "log-prob under the proximal policy minus log-prob under the behavior policy"),
    ("clipped_new_logp", "new_logp of the clipped tokens"),
    ("clipped_old_logp", "old_logp of the clipped tokens"),
    ("vocab_min_logits", "minimum logit over the vocabulary at each trained token, before the temperature"),
    ("vocab_max_logits", "maximum logit over the vocabulary at each trained token, before the temperature"),
    ("rkl_loss", "distillation: k1 estimate of the reverse KL to the teacher per token"),
    ("sapo_soft_gate", "SAPO: the gate per token"),
    ("sapo_scaled_gate_pos", "SAPO: the scaled gate of tokens with an advantage above 0"),
    ("sapo_scaled_gate_neg", "SAPO: the scaled gate of tokens with an advantage of 0 or less"),
)
_UPDATE_COUNTS: _Rows = (
    ("unclipped_behave_tokens", "trained tokens that rejection sampling and M2PO keep"),
    ("clipped_tokens", "clipped tokens among those that rejection sampling and M2PO keep"),
    ("rs_filtered_fraction", "share of trained tokens that rejection sampling drops or clamps"),
    ("kl_loss", "with kl_loss_coef: mean KL to the reference per trained token"),
    ("kl_coef", "with kl_loss_coef: weight of the KL term"),
    ("grad_norm", "gradient norm before clipping"),
    ("lr", "learning rate"),
    ("update_successful", "share of the step's updates whose gradient was finite; other updates are skipped"),
    (
        "num_micro_batches",
        "forward and backward passes per optimizer step, summed over data-parallel replicas and averaged over the "
        "update's steps",
    ),
)
_LOGP: _Rows = (
    ("prox_logp_gt", "log-prob under the proximal policy, recomputed"),
    ("kl_div_direct", "k1 estimate of the KL between behavior and proximal policy, per token"),
    ("kl_div_taylor", "k2 estimate of the KL between behavior and proximal policy, per token"),
    ("kl_div_dual", "k3 estimate of the KL between behavior and proximal policy, per token"),
)
_APPROXIMATED: _Rows = (
    ("approx_logp", "proximal log-prob approximated by this method"),
    ("behave_imp_weight", "ratio of the proximal policy to the behavior policy, from approx_logp"),
    ("importance_weight", "ratio of the policy to the proximal policy, from approx_logp"),
    ("abs_error", "absolute error of approx_logp"),
    ("rel_error", "relative error of approx_logp"),
    ("squared_error", "squared error of approx_logp"),
    ("behave_imp_weight_abs_error", "absolute error of behave_imp_weight"),
    ("behave_imp_weight_rel_error", "relative error of behave_imp_weight"),
    ("importance_weight_abs_error", "absolute error of importance_weight"),
    ("importance_weight_rel_error", "relative error of importance_weight"),
)
_VERSIONS: _Rows = (
    *(
        (f"sample_staleness_{policy}_{part}", f"{statistic} lag of the trained tokens behind {reference}, in versions")
        for policy, reference in (("proximal", "the proximal policy"), ("theta", "the policy"))
        for part, statistic in (("avg", "mean"), ("max", "maximum"), ("min", "minimum"))
    ),
    ("v_theta", "version that the update produces"),
    ("v_proximal", "version of the proximal policy"),
    ("n_valid_generated_tokens", "trained tokens that carry a version"),
)
_CRITIC: _Rows = (
    ("new_value", "predicted value during the update, per trained token"),
    ("old_value", "predicted value before the update"),
    ("target_value", "regression target"),
    ("critic_loss", "the value loss"),
    ("clip_ratio", "share of trained tokens whose prediction is clipped"),
)
_SFT: _Rows = (("loss", "negative log-prob of each trained token, in nats"), ("ppl", "perplexity of each sequence"))
_SFT_COUNTS: _Rows = (
    ("n_seqs", "sequences of the step"),
    ("n_tokens", "tokens of the step"),
    ("n_valid_tokens", "trained tokens"),
    ("prompt_tokens", "tokens of the prompts"),
)
_RW: _Rows = (
    ("correct_ratio", "1 for a pair whose chosen response has the higher score, else 0"),
    ("pos_score", "score of chosen responses"),
    ("neg_score", "score of rejected responses"),
    ("loss", "pairwise loss"),
)
_DPO: _Rows = (
    ("loss", "pairwise loss"),
    ("chosen_reward", "beta times the log-ratio of policy and reference, for chosen responses"),
    ("rejected_reward", "beta times the log-ratio of policy and reference, for rejected responses"),
    ("reward_accuracy", "1 for a pair whose chosen response has the higher reward, else 0"),
    ("reward_margin", "chosen minus rejected reward"),
)
_TIMES: _Rows = (
    ("step", "the whole step except saving and evaluation"),
    ("rollout", "waiting for a batch of episodes"),
    ("rollout_pause", "longest pause of a replica's generation during the weight update"),
    ("recompute_logp", "computing proximal log-probs"),
    ("ref_logp", "computing log-probs of the reference"),
    ("teacher_logp", "computing log-probs of the teacher"),
    ("critic_values", "computing the critic's values"),
    ("compute_advantage", "computing advantages"),
    ("train_step", "actor update"),
    ("critic_train_step", "critic update"),
    ("update_weights", "sending new weights to the rollout"),
    ("save", "saving models; with asynchronous saving, copying them"),
    ("checkpoint_for_recover", "writing a recovery checkpoint"),
    ("eval", "evaluation"),
)
_MEMORY: _Rows = (
    ("peak_resident_gib", "peak resident memory so far, summed over the run's processes on this machine, in GiB"),
    (
        "available_gib",
        "memory that is available after the step, in GiB: the minimum of the machine's free memory and the rest of "
        "the cgroup limit",
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
        ("Proximal log-probs", f"ppo_actor/update/compute_logp/{method}", "avg, min, max", _APPROXIMATED)
        for method in ("loglinear", "linear", "rollout")
    ),
    ("Staleness", "ppo_actor/update/version_stats", "number", _VERSIONS),
    ("The critic's update", "ppo_critic", "avg, min, max", _CRITIC),
    ("SFT", "sft", "avg, min, max", _SFT),
    ("SFT", "sft", "number", _SFT_COUNTS),
    ("Reward model", "rw", "avg, min, max", _RW),
    ("Reward model", "rw", "number", (("n_pairs", "pairs of the step"),)),
    ("DPO and IPO", "dpo", "avg, min, max", _DPO),
    ("Seconds", "timeperf", "number", _TIMES),
    ("Memory", "memory", "number", _MEMORY),
)
"""Sections of statistics with title, scope, exported numbers and rows."""


def documented() -> Iterator[tuple[str, Statistic]]:
    """Yield each statistic with the title of its section."""
    for title, scope, exported, rows in SECTIONS:
        for name, meaning in rows:
            yield title, Statistic(f"{scope}/{name}", exported, meaning)


def with_short_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """Add copies of statistics under their shorter names (see :data:`SHORT_NAMES` and :data:`MEANS`)."""
    aliases = {
        f"{short}{end}": numbers[f"{full}{end}"]
        for short, full in SHORT_NAMES.items()
        for end in ("", "/avg", "/min", "/max")
        if f"{full}{end}" in numbers
    }
    aliases |= {name: numbers[f"{name}/avg"] for name in MEANS if f"{name}/avg" in numbers}
    return {**numbers, **aliases}
