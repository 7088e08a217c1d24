"""The statistics of experiments by name, with what each means; the docs page is made from this table.

Special here: the quickstart knows some of them by shorter names than the code that records them. Both appear: ``SHORT_NAMES``
says which, and the logger adds them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Told = Literal["avg, min, max", "number"]
"""Which numbers of a statistic appear: three, under ``name/avg``, ``name/min`` and ``name/max``, or one under its name."""

MEANS = tuple(f"{kind}/{name}" for kind in ("rollout", "eval-rollout") for name in ("reward", "num_turns"))
"""Names that also stand for the mean itself, as they do in the documentation."""


@dataclass(frozen=True, slots=True)
class Statistic:
    """One statistic."""

    name: str  # full name
    told: Told  # which numbers of it appear
    meaning: str  # in words, with the unit

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of its numbers."""
        return (self.name,) if self.told == "number" else tuple(f"{self.name}/{part}" for part in ("avg", "min", "max"))


SHORT_NAMES = {
    "ppo_actor/importance_weight": "ppo_actor/update/importance_weight",
    "ppo_actor/actor_clip_ratio": "ppo_actor/update/clip_ratio",
    "ppo_actor/actor_loss": "ppo_actor/update/actor_loss",
}
"""The quickstart's name of a statistic to the name that it is recorded under."""

_Rows = tuple[tuple[str, str], ...]

_ROLLOUT: _Rows = (
    ("reward", "reward of each response"),
    ("num_turns", "answers of the model in the episode of each response; absent where the workflow has one turn"),
)
_EPISODES: _Rows = (
    ("accepted", "prompts so far whose episodes a batch may take or has taken"),
    ("rejected", "prompts so far that failed or that a filter took out"),
)
_EVALUATED: _Rows = (("accepted", "prompts of this evaluation that count"), ("rejected", "and those that failed"))
_BATCH: _Rows = (
    ("task_reward", "reward of each response; it should rise"),
    ("advantages", "advantage of each trained token, after normalization"),
    ("kl_rewards", "per trained token: minus kl_ctl times the KL estimate to the reference"),
    ("final_reward", "reward of each response after penalty, bias, scaling, clip, normalization and KL"),
    ("no_eos_ratios", "1 for a response that was cut off, 0 for one that ended by itself"),
    ("prompt_len", "tokens of each prompt"),
    ("seq_len", "tokens of each sequence, prompt and response"),
    ("correct_seq_len", "the same of sequences with a reward above 0"),
    ("incorrect_seq_len", "and of the others"),
)
_BATCH_COUNTS: _Rows = (
    ("n_seqs", "sequences of the step"),
    ("correct_n_seqs", "of those, with a reward above 0"),
    ("incorrect_n_seqs", "and the others"),
    ("n_tokens", "tokens of the step, prompts counted"),
    ("n_valid_tokens", "tokens that are trained on"),
    ("eps_clip", "the clip range that holds"),
    ("c_clip", "the dual-clip bound that holds; absent without one"),
    ("use_dual_clip", "1 with a dual-clip bound"),
    ("mask_no_eos_with_zero", "1 where a response that was cut off gets no reward"),
    ("rs_upper", "upper bound of rejection sampling; absent without one"),
    ("rs_lower", "lower bound of rejection sampling; absent without one"),
)
_UPDATE: _Rows = (
    ("importance_weight", "ratio of the policy to the proximal one, per token; near 1"),
    ("approx_kl", "log-prob of the policy minus that of the proximal one, per token"),
    ("new_logp", "log-prob of each trained token under the policy"),
    ("old_logp", "and when it was sampled"),
    ("entropy", "of the policy's distribution at each trained token, in nats"),
    ("actor_loss", "the policy loss; shows no trend, and is no measure of success"),
    ("clip_ratio", "share of kept trained tokens that the clip range leaves without gradient; usually below 0.1"),
    ("dual_clip_ratio", "share of kept trained tokens at the dual-clip bound"),
    ("behave_imp_weight", "ratio of the proximal policy to the one that sampled, per token"),
    ("behave_approx_kl", "log-prob under the proximal policy minus that when sampled"),
    ("clipped_new_logp", "new_logp of the clipped tokens"),
    ("clipped_old_logp", "old_logp of the clipped tokens"),
    ("vocab_min_logits", "least logit of the vocabulary at each trained token, before the temperature"),
    ("vocab_max_logits", "and the greatest"),
    ("rkl_loss", "distillation: reverse KL to the teacher per token"),
    ("sapo_soft_gate", "SAPO: the gate per token"),
    ("sapo_scaled_gate_pos", "SAPO: the scaled gate of tokens with an advantage above 0"),
    ("sapo_scaled_gate_neg", "SAPO: and of the others"),
)
_UPDATE_COUNTS: _Rows = (
    ("unclipped_behave_tokens", "trained tokens that rejection sampling keeps"),
    ("clipped_tokens", "kept trained tokens that the clip range leaves without gradient"),
    ("rs_filtered_fraction", "share of trained tokens that rejection sampling takes out, or whose weight it clamps"),
    ("kl_loss", "with kl_loss_coef: mean KL to the reference per trained token"),
    ("kl_coef", "and its weight"),
    ("grad_norm", "gradient norm before clipping"),
    ("lr", "learning rate that was used"),
    ("update_successful", "1, or 0 where the gradient was not finite and the weights were left alone"),
    (
        "num_micro_batches",
        "forward and backward passes of an optimizer step, over all ranks; mean over the update's steps",
    ),
)
_LOGP: _Rows = (
    ("prox_logp_gt", "log-prob under the proximal policy, computed"),
    ("kl_div_direct", "estimate k1 of the KL between the policy that sampled and the proximal one, per token"),
    ("kl_div_taylor", "estimate k2 of it"),
    ("kl_div_dual", "estimate k3 of it"),
)
_APPROXIMATED: _Rows = (
    ("approx_logp", "proximal log-prob as this method approximates it"),
    ("behave_imp_weight", "importance weight that follows from it, to the policy that sampled"),
    ("importance_weight", "importance weight that follows from it, of the policy"),
    ("abs_error", "absolute error of the log-prob"),
    ("rel_error", "relative error of the log-prob"),
    ("squared_error", "squared error of the log-prob"),
    ("behave_imp_weight_abs_error", "absolute error of that weight"),
    ("behave_imp_weight_rel_error", "relative error of that weight"),
    ("importance_weight_abs_error", "absolute error of that weight"),
    ("importance_weight_rel_error", "relative error of that weight"),
)
_VERSIONS: _Rows = (
    *(
        (f"sample_staleness_{policy}_{part}", f"{words} of the versions that the trained tokens are behind {whom}")
        for policy, whom in (("proximal", "the proximal policy"), ("theta", "the policy"))
        for part, words in (("avg", "mean"), ("max", "greatest"), ("min", "least"))
    ),
    ("v_theta", "version of the policy"),
    ("v_proximal", "version of the proximal policy"),
    ("n_valid_generated_tokens", "trained tokens that carry a version"),
)
_CRITIC: _Rows = (
    ("new_value", "prediction during the update, per trained token"),
    ("old_value", "prediction before it"),
    ("target_value", "what it is trained towards"),
    ("critic_loss", "the value loss"),
    ("clip_ratio", "share of trained tokens whose prediction is clipped"),
)
_SFT: _Rows = (("loss", "negative log-prob of each trained token, in nats"), ("ppl", "perplexity of each sequence"))
_SFT_COUNTS: _Rows = (
    ("n_seqs", "sequences of the step"),
    ("n_tokens", "tokens of the step"),
    ("n_valid_tokens", "tokens that are trained on"),
    ("prompt_tokens", "and those that are not"),
)
_RW: _Rows = (
    ("correct_ratio", "1 for a pair whose chosen answer has the higher score, else 0"),
    ("pos_score", "score of chosen answers"),
    ("neg_score", "score of rejected answers"),
    ("loss", "the pair loss"),
)
_DPO: _Rows = (
    ("loss", "the pair loss"),
    ("chosen_reward", "beta times the log-ratio of policy and reference, of chosen answers"),
    ("rejected_reward", "the same of rejected answers"),
    ("reward_accuracy", "1 for a pair whose chosen answer has the higher reward, else 0"),
    ("reward_margin", "difference of the two"),
)
_TIMES: _Rows = (
    ("rollout", "waiting for a batch of episodes"),
    ("rollout_pause", "generation stood still"),
    ("recompute_logp", "proximal log-probs"),
    ("ref_logp", "log-probs of the reference"),
    ("teacher_logp", "log-probs of the teacher"),
    ("critic_values", "values of the critic"),
    ("compute_advantage", "advantages"),
    ("train_step", "the actor's update"),
    ("critic_train_step", "the critic's update"),
    ("update_weights", "new weights to the rollout"),
    ("save", "saving models; with asynchronous saving, the copy"),
    ("checkpoint_for_recover", "writing a restart point"),
    ("eval", "evaluation"),
)

SECTIONS: tuple[tuple[str, str, Told, _Rows], ...] = (
    ("Rollout", "rollout", "avg, min, max", _ROLLOUT),
    ("Rollout", "rollout", "number", _EPISODES),
    ("Evaluation", "eval-rollout", "avg, min, max", _ROLLOUT),
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
)
"""Title, scope, numbers and rows."""


def documented() -> Iterator[tuple[str, Statistic]]:
    """All statistics, each with the title of its section."""
    for title, scope, told, rows in SECTIONS:
        for name, meaning in rows:
            yield title, Statistic(f"{scope}/{name}", told, meaning)


def with_short_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """``numbers`` with those of the quickstart's names, and of :data:`MEANS`, added whose statistic is among them."""
    added = {
        f"{short}{end}": numbers[f"{full}{end}"]
        for short, full in SHORT_NAMES.items()
        for end in ("", "/avg", "/min", "/max")
        if f"{full}{end}" in numbers
    }
    added |= {name: numbers[f"{name}/avg"] for name in MEANS if f"{name}/avg" in numbers}
    return {**numbers, **added}
