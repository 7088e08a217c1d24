"""The loss function of a run, made from its options; one factory per built-in algorithm that has any."""

from __future__ import annotations

from functools import partial

from areno.config.train_options import TrainOptions
from areno.loss_fns import dpo_loss_fn, grpo_loss_fn, gspo_loss_fn, ppo_loss_fn
from areno.loss_fns.pack import LossFn


def gspo_loss(options: TrainOptions) -> LossFn:
    """GSPO with the run's clip range and KL term."""
    return partial(
        gspo_loss_fn,
        clip_eps=options.gspo_clip_eps,
        clip_eps_high=options.clip_eps_high,
        kl_coef=options.kl_coef,
        kl_type=options.kl_loss_type,
    )


def grpo_loss(options: TrainOptions) -> LossFn:
    """GRPO with the run's clip ranges, average and KL term."""
    return partial(
        grpo_loss_fn,
        clip_eps=options.grpo_clip_eps,
        clip_eps_high=options.clip_eps_high,
        dual_clip=options.grpo_dual_clip,
        loss_mean=options.grpo_loss_mean,
        max_tokens=options.max_new_tokens,
        kl_coef=options.kl_coef,
        kl_type=options.kl_loss_type,
    )


def ppo_loss(options: TrainOptions) -> LossFn:
    """The PPO actor's loss with the run's clip ranges and KL term."""
    return partial(
        ppo_loss_fn,
        clip_eps=options.clip_eps,
        clip_eps_high=options.clip_eps_high,
        clip_ratio_c=options.clip_ratio_c,
        use_kl_loss=options.use_kl_loss,
        kl_loss_coef=options.kl_loss_coef,
        kl_loss_type=options.kl_loss_type,
    )


def dpo_loss(options: TrainOptions) -> LossFn:
    """DPO with the run's shape and sharpness."""
    return partial(
        dpo_loss_fn,
        beta=options.dpo_beta,
        loss_type=options.dpo_loss_type,
        label_smoothing=options.dpo_label_smoothing,
        length_normalised=options.dpo_length_normalised,
    )
