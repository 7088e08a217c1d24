"""Lists normal values of metrics, and remedies for abnormal values.

``areno explain`` and ``docs/run-directory.md`` show the normal values and the remedies. A value outside its normal range is
not an error, but a reason to look closer.

The remedies and the texts about normal values refer to options of ``areno train``. For an experiment (``areno run``),
:func:`advice_for` replaces each option by the corresponding setting.
"""

import math
from dataclasses import dataclass, replace

from areno.config.setting_names import in_settings
from areno.observability.health import LOGPROB_GAP_LIMIT, LOGPROB_GAP_LIMIT_FP32
from areno.observability.train_metrics import matches

ABOVE_ZERO = 5e-324
"""Lower bound of a range that excludes 0."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The normal values of a metric, and a remedy for abnormal values.

    ``low`` and ``high`` are the bounds of the normal range; None means that the range has no such bound.
    """

    normal: str
    remedy: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def range(self) -> str:
        """The normal range, such as ``0 to 0.2`` or ``at least 0``; empty if there are no bounds."""
        if self.low == ABOVE_ZERO:
            return "above 0"
        if self.low is None or self.high is None:
            bounds = ((self.low, "at least"), (self.high, "at most"))
            return "".join(f"{words} {bound:g}" for bound, words in bounds if bound is not None)
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"

    @property
    def text(self) -> str:
        """The normal range and the description of normal values."""
        return "; ".join(filter(None, (self.range, self.normal)))

    def accepts(self, value: float) -> bool | None:
        """Return whether a value is in the normal range; None if there are no bounds."""
        if self.low is None and self.high is None:
            return None
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high) and not math.isnan(value)


_OFF_POLICY = "Lower --lr, or take fewer optimizer steps per rollout: lower --update-epochs or --update-minibatches"
_CUT = "Raise --max-new-tokens. If the model never stops, check its EOS token and chat template, or use SFT to teach it to stop"
_SKIPPED = (
    "If grad_norm is 0, no token was trained on: check the loss masks. Otherwise, lower --lr or --grad-clip-norm, or use "
    "--dtype float32. Then resume from a checkpoint before the skipped step"
)
_RISING_PAIRS = (
    "If this metric does not change, raise --lr. If the accuracy on the training pairs reaches 1 early, lower --epochs or use "
    "more pairs"
)
_PLAN = "`areno plan` prints how much memory each phase needs, and options that reduce it"
_SLOWER = "docs/statistics.md explains how to profile a step"
_GAP = (
    "Use --dtype float32. With a mixture-of-experts model, also use --return-routed-experts. If the difference "
    "remains, check that rollout and trainer have the same weights and --temperature"
)

ADVICE: dict[str, Advice] = {
    "rollout/rewards_mean": Advice(
        "rises over tens of steps, with noise from step to step",
        "If the reward stays flat, look at zero_std_groups, read samples with `areno inspect RUN`, or raise --lr "
        "or --n-samples. If the reward falls, lower --lr. If the reward rises while samples get worse, the reward has a "
        "loophole",
    ),
    "rollout/rewards_std": Advice(
        "at 0, all rewards are equal and give no learning signal",
        "Use prompts that the policy sometimes answers correctly, raise --temperature or --n-samples, or use a "
        "finer-grained reward",
        low=ABOVE_ZERO,
    ),
    "rollout/reward_parts/NAME": Advice(
        "rises or stays constant",
        "If one part falls while another part rises, the policy may exploit the rising part. Read samples from late "
        "in the run. Then fix the loophole, or change --reward-weights",
    ),
    "rollout/accuracy": Advice(
        "0.1 to 0.9 while the policy learns. The metric counts every sample with a reward above 0 as correct",
        "If the accuracy is near 0, use easier prompts, or run SFT first. If the accuracy is near 1, the task is "
        "solved: use harder prompts",
    ),
    "rollout/advantages_mean": Advice(
        "near 0 for group-relative advantages. The value is not exactly 0, because longer answers count more in a "
        "mean over tokens",
    ),
    "rollout/logprobs_mean": Advice(
        "-2 to 0 for a pretrained model. About -log(vocabulary size) for a randomly initialized model",
        "If the log-prob of a pretrained model is far below -2, check the chat template and the tokenizer",
    ),
    "rollout/response_len_mean": Advice(
        "changes slowly, and stays well below --max-new-tokens",
        "If the length reaches the limit, see truncated_ratio. If the length collapses, lower --lr, and check that "
        "the reward does not favor short answers",
    ),
    "rollout/skipped_long": Advice(
        "each skipped prompt reduces the training data",
        "Raise --max-prompt-tokens",
        0,
        0,
    ),
    "train/loss": Advice(
        "near 0, with no trend, for GSPO and GRPO. For SFT, DPO and reward models, the loss falls",
        "With RL, watch the reward instead. With SFT, DPO and reward models, raise --lr if the loss does not fall, and "
        "lower --lr if the loss jumps",
    ),
    "train/policy_loss": Advice(
        "no trend, because the policy loss does not measure success",
        "Watch the reward instead",
    ),
    "train/sft_loss": Advice(
        "falls quickly at first, then slowly. With a pretrained model, the loss is 0.5 to 3",
        "If the loss does not fall, raise --lr and check the chat template. If the loss jumps, lower --lr. If "
        "eval/loss rises while the training loss falls, stop earlier (--early-stop-patience)",
    ),
    "train/entropy": Advice(
        "falls slowly. With a pretrained model, the entropy is 0.1 to 3",
        "If the entropy is near 0, all answers are alike and learning stops: raise --temperature, lower --lr, or add "
        "a KL term. If the entropy rises steadily, the model degenerates: lower --lr",
    ),
    "train/ratio_mean": Advice(
        "near 1 with a synchronous rollout and one optimizer step per batch", _OFF_POLICY, 0.9, 1.1
    ),
    "train/ratio_std": Advice(
        "near 0 with a synchronous rollout and one optimizer step per batch", _OFF_POLICY, 0, 0.5
    ),
    "train/clip_fraction": Advice(
        "near 0 with a synchronous rollout and one optimizer step per batch. With several steps, GSPO clips a larger fraction "
        "than GRPO",
        _OFF_POLICY,
        0,
        0.2,
    ),
    "train/pg_clipfrac": Advice(
        "near 0 with a synchronous rollout and one optimizer step per batch", _OFF_POLICY, 0, 0.2
    ),
    "train/pg_clipfrac_lower": Advice("near 0", _OFF_POLICY, 0, 0.01),
    "train/ppo_kl": Advice("near 0, because the policy changes little in a step", _OFF_POLICY, -0.02, 0.05),
    "train/logp_abs_diff_mean": Advice(
        f"about 1e-7 in fp32 on a CPU, 0.001 to 0.02 in bf16. areno warns above {LOGPROB_GAP_LIMIT_FP32:g} in fp32, "
        f"and above {LOGPROB_GAP_LIMIT:g} otherwise. With an asynchronous rollout, the weights change "
        "between sampling and training, so the difference is larger and areno does not warn",
        _GAP,
        0,
        LOGPROB_GAP_LIMIT,
    ),
    "train/logp_diff_mean": Advice(
        "much closer to 0 than logp_abs_diff_mean", _GAP, -LOGPROB_GAP_LIMIT, LOGPROB_GAP_LIMIT
    ),
    "train/grad_norm": Advice(
        "stays within one order of magnitude during a run",
        "A norm of 0 has three possible causes: all advantages are 0 (see zero_std_groups), all tokens are clipped, "
        "or no token is trained on. If the norm has spikes, lower --lr or --grad-clip-norm",
        low=ABOVE_ZERO,
    ),
    "train/grad_norm_clipped": Advice(
        "at most --grad-clip-norm. If the gradient was clipped, the norm equals --grad-clip-norm",
    ),
    "train/grad_zero_ratio": Advice(
        "usually below 0.5. If a step uses only a few rows of a large embedding, the ratio is higher",
        "If the ratio is near 1, check the loss masks",
        0,
        0.9,
    ),
    "train/update_skipped": Advice("", _SKIPPED, 0, 0),
    "train/loss_scale": Advice(
        "a power of two. The scale halves when a gradient overflows, and rises again later",
        "If updates are still skipped at the minimum scale (1 by default), use dtype bfloat16 or float32",
        low=1,
    ),
    "train/kl_loss": Advice(
        "starts at 0, later usually at most a few tenths",
        "If the KL loss keeps rising, the policy moves far from the reference: raise the weight of the KL term, or "
        "lower --lr",
        0,
        1,
    ),
    "train/kl_reward_mean": Advice(
        "small compared with the rewards", "If the KL reward outweighs the other rewards, lower --kl-reward-coef"
    ),
    "train/routed_experts_changed": Advice(
        "near 0 in the first optimizer step after a synchronous rollout", _OFF_POLICY, 0, 0.2
    ),
    "train/reward_errors": Advice(
        "", "Fix the reward function. The log lists each record on which the function failed", 0, 0
    ),
    "train/empty_responses": Advice(
        "",
        "The model stops at once: check the chat template. Also check that the reward does not favor empty answers",
        0,
        0,
    ),
    "train/zero_std_groups": Advice(
        "with group-relative advantages, prompts whose samples have equal rewards give no learning signal",
        "If rewards are low, use easier prompts or a finer-grained reward, run SFT first, or raise --n-samples or "
        "--temperature. If rewards are high, use harder prompts",
        0,
        0.5,
    ),
    "train/truncated_ratio": Advice("truncated answers get unreliable rewards", _CUT, 0, 0.2),
    "train/sampling_cut_mass": Advice(
        "above 0 only with --top-k, --top-p or a grammar. With --top-p alone, the value is below 1 - top_p",
        "Training assumes sampling without --top-k, --top-p and grammars: omit --top-k and --top-p, or raise their values",
        0,
        0.2,
    ),
    "train/staleness_mean": Advice("at most --max-staleness", "Lower --max-staleness if learning is unstable"),
    "train/staleness_max": Advice("at most --max-staleness", "Lower --max-staleness if learning is unstable"),
    "train/agent_failed": Advice("", "To find the cause, read the agent's errors in the log", 0, 0),
    "train/agent_filtered_long": Advice("", "Raise --max-context-len, or shorten the conversations", 0, 0),
    "train/agent_forks": Advice(
        "",
        "The log reports the number of forks for each cause. docs/agentic.md explains the causes",
        0,
        0,
    ),
    "train/workflow_failed": Advice("", "To find the cause, read the workflow's errors in the log", 0, 0),
    "train/tokens_per_second": Advice("steady. The speed falls when answers become longer", _SLOWER),
    "train/step_wall_time_s": Advice(
        "larger than the sum of the stage times (time/*), because a step also writes samples and transfers weights",
        _SLOWER,
    ),
    "train/weight_update_time_s": Advice(
        "small compared with the step time", "docs/fleet.md compares the methods of weight transfer"
    ),
    "train/dpo_loss": Advice(
        "falls. In DPO, the loss starts at 0.69 (sigmoid loss), 1 (hinge loss) or 1 / (2 beta)^2 (IPO)",
        _RISING_PAIRS,
        low=0,
    ),
    "train/dpo_accuracy": Advice(
        "0 to 0.5 in the first step of DPO, where all implicit rewards are equal up to rounding, and a pair with equal rewards "
        "does not count. Later 0.6 to 0.95",
        _RISING_PAIRS,
    ),
    "train/dpo_reward_margin": Advice("rises above 0. In DPO, the margin starts at 0", _RISING_PAIRS),
    "train/dpo_chosen_reward": Advice(
        "near 0 with DPO. This reward often falls slightly while the rejected reward falls faster",
        "If chosen and rejected rewards fall far, both answers become unlikely: raise --dpo-beta (DPO), lower --lr, "
        "or lower --epochs",
    ),
    "train/pair_loss": Advice(
        "falls. In SimPO with --simpo-gamma 1, the loss starts at 1.31 if the initial model gives the chosen and the rejected "
        "answer equal rewards",
        _RISING_PAIRS,
        low=0,
    ),
    "train/pair_accuracy": Advice("depends on the initial model in the first step, later 0.6 to 0.95", _RISING_PAIRS),
    "train/pair_reward_margin": Advice("rises. With SimPO, this metric should exceed --simpo-gamma", _RISING_PAIRS),
    "train/pair_chosen_reward": Advice(
        "below 0 with SimPO, because the reward is --simpo-beta times the mean log-prob of the answer",
        "If chosen and rejected rewards fall far, both answers become unlikely: lower --lr or --epochs",
    ),
    "train/rm_loss": Advice("starts at 0.69, then falls", _RISING_PAIRS, 0, 0.75),
    "train/rm_accuracy": Advice(
        "0 in the first step, because a new reward head gives all answers equal scores. Later 0.6 to 0.9", _RISING_PAIRS
    ),
    "train/critic_explained_variance": Advice(
        "values below 0 are normal only in the first steps. Later usually at least 0.3",
        "If the metric stays near 0, raise --critic-lr. Two other options of `areno train` can help: "
        "--critic-warmup-steps and, if most answers are truncated, --no-bootstrap-truncated",
        0,
        1,
    ),
    "train/critic_value_loss": Advice(
        "falls during the critic warm-up. Later, the loss may rise or fall when the policy changes",
        "See critic_explained_variance",
    ),
    "train/critic_value_clipfrac": Advice("", "Lower --critic-lr, or raise --value-clip-eps", 0, 0.2),
    "train/normalized_advantage_std": Advice("1 with --whiten-advantages", "", 0.9, 1.1),
    "train/actor_train_skipped": Advice("1 in the first --critic-warmup-steps steps, then 0"),
    "eval/rewards_mean": Advice(
        "rises with the training reward, but stays somewhat lower",
        "If this reward falls while the training reward rises, the policy memorizes or exploits the training "
        "prompts. Stop at the best evaluation (--keep-best, --early-stop-patience), or use more prompts",
    ),
    "eval/loss": Advice(
        "falls, and stays slightly above the training loss",
        "If this loss rises while the training loss falls, stop earlier or add data",
    ),
    "eval/accuracy": Advice("rises", "See eval/rewards_mean"),
    "eval/pass@K": Advice(
        "rises with K",
        "If pass@1 rises while pass@K for a larger K falls, the answers lose diversity: see train/entropy",
        0,
        1,
    ),
    "eval/truncated_ratio": Advice("", _CUT, 0, 0.2),
    "time/rollout": Advice("at least half of the step time", f"{_SLOWER}. Truncated answers take the most time"),
    "time/reward": Advice(
        "a small part of the step time", "Raise --reward-workers, or make the reward function faster"
    ),
    "memory/peak_resident_gib": Advice(
        "rises in the first steps, then stays constant",
        "If the peak keeps rising, there is a memory leak: check the reward function, the agent and the data loader "
        "first",
    ),
    "memory/available_gib": Advice(
        "stays well above 0",
        f"If the available memory is near 0, the kernel may kill processes. {_PLAN}",
    ),
    "memory/peak_gpu_gib": Advice(
        "rises in the first steps, then stays constant",
        f"If the peak is near the size of the GPU's memory, a step may fail. {_PLAN}",
    ),
}
"""Maps each metric of ``areno train`` to its advice."""
_LIKE = {
    "train/clip_fraction": ("train/clip_fraction_high", "train/clip_fraction_low", "ppo_actor/update/clip_ratio"),
    "train/dpo_loss": ("dpo/loss",),
    "train/dpo_accuracy": ("dpo/reward_accuracy",),
    "train/dpo_reward_margin": ("train/dpo_margin", "dpo/reward_margin"),
    "train/dpo_chosen_reward": ("dpo/chosen_reward",),
    "train/rm_accuracy": ("rw/correct_ratio",),
    "train/rm_loss": ("rw/loss",),
    "train/sft_loss": ("sft/loss",),
    "train/update_skipped": ("train/critic_update_skipped",),
    "train/grad_norm": ("train/critic_grad_norm",),
    "rollout/rewards_mean": ("train/reward_mean", "rollout/reward", "ppo_actor/task_reward"),
    "eval/rewards_mean": ("eval-rollout/reward",),
    "train/truncated_ratio": ("ppo_actor/no_eos_ratios",),
    "train/ratio_mean": ("ppo_actor/update/importance_weight",),
    "train/policy_loss": ("train/total_loss", "ppo_actor/update/actor_loss"),
    "train/pg_clipfrac_lower": ("train/clip_fraction_dual", "ppo_actor/update/dual_clip_ratio"),
    "train/critic_value_loss": ("ppo_critic/critic_loss",),
    "train/critic_value_clipfrac": ("ppo_critic/clip_ratio",),
    "train/staleness_mean": ("rollout/staleness",),
    "time/rollout": ("timeperf/rollout",),
    "time/reward": ("train/reward_score_time_s",),
    "train/weight_update_time_s": ("timeperf/update_weights", "train/rollout_pause_time_s", "timeperf/rollout_pause"),
}
"""Maps a metric to other metrics that have the same advice."""
_LIKE_OF = {name: source for source, names in _LIKE.items() for name in names}


def advice_for(name: str, *, experiment: bool = False) -> Advice | None:
    """Return the advice for the metric with this full name; None if there is no advice.

    With ``experiment``, the texts mention settings of experiments instead of options of ``areno train``.
    """
    source = _LIKE_OF.get(name, name)
    advice = ADVICE.get(source) or next((ADVICE[key] for key in ADVICE if matches(key, source)), None)
    if advice is None or not experiment:
        return advice
    return replace(advice, normal=in_settings(advice.normal), remedy=in_settings(advice.remedy))
