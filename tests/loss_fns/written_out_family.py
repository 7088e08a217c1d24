"""The policy loss family as loops over Python floats: an independent reference for its tests.

Rows are those of `Batch.rows`. Besides ``x``, the log-prob being trained, each token has ``x0``: the same number held
constant. A formula reads ``x0`` wherever the paper stops the gradient, so its slope in ``x`` is the gradient.
"""

from __future__ import annotations

import math

from tests.loss_fns.test_rejection import expected as behavior_of
from tests.loss_fns.written_out import clipped, mean, ratio_of


def interpolation_fraction(version_of_token, version):
    if version_of_token < 0 or version_of_token == version:
        return 0.0
    return min(max((version - 1 - version_of_token) / (version - version_of_token), 0.0), 1.0)


def approximation(kind, token, version):
    alpha = interpolation_fraction(token["versions"], version)
    if kind == "rollout":
        return token["logprobs"]
    if kind == "loglinear":
        return token["logprobs"] + alpha * (token["x0"] - token["logprobs"])
    return math.log((1 - alpha) * math.exp(token["logprobs"]) + alpha * math.exp(token["x0"]))


def proximal(token, knobs, version):
    if not knobs.use_decoupled_loss:
        return token["logprobs"]
    if knobs.prox_logp_method in ("recompute", "metrics"):
        return token["prox_logprobs"]
    return approximation(knobs.prox_logp_method, token, version)


def surrogate(ratio, frozen_ratio, advantage, token, knobs):
    low, high = knobs.eps_clip, knobs.eps_clip if knobs.eps_clip_higher is None else knobs.eps_clip_higher
    if knobs.use_sapo_loss:
        tau = knobs.sapo_tau_pos if advantage > 0 else knobs.sapo_tau_neg
        return -advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
    if knobs.use_cispo_loss:
        return -min(max(frozen_ratio, 1 - low), 1 + high) * advantage * token["x"]
    return clipped(ratio, advantage, low, high, knobs.c_clip or math.inf)


def policy(rows, knobs, version):
    """Sum over tokens of w l, divided by the number of response tokens."""
    rows = [[token | {"prox_logprobs": proximal(token, knobs, version)} for token in row] for row in rows]
    if knobs.rejection_sampling is not None:
        behavior = behavior_of(knobs.rejection_sampling, rows)
    else:
        behavior = [[(math.exp(t["prox_logprobs"] - t["logprobs"]), True, False) for t in row] for row in rows]
    total = 0.0
    for row, weights in zip(rows, behavior, strict=True):
        stays = [
            keep and (knobs.m2_threshold is None or t["keep"]) for t, (_, keep, _) in zip(row, weights, strict=True)
        ]
        kept = [token for token, stay in zip(row, stays, strict=True) if stay]
        moved = mean([t["x"] - t["prox_logprobs"] for t in kept])
        average = mean([t["advantages"] for t in kept])
        for token, (weight, _, _), stay in zip(row, weights, stays, strict=True):
            ratio, advantage = ratio_of(token["x"] - token["prox_logprobs"]), token["advantages"]
            frozen = ratio_of(token["x0"] - token["prox_logprobs"])
            if knobs.importance_sampling_level == "sequence":
                ratio, advantage = ratio_of(moved), average
                frozen = ratio_of(mean([t["x0"] - t["prox_logprobs"] for t in kept]))
            if stay:
                factor = weight if knobs.use_decoupled_loss else 1.0
                total += factor * surrogate(ratio, frozen, advantage, token, knobs)
    return total / max(sum(map(len, rows)), 1)


def reverse_kl(rows):
    return mean([ratio_of(t["x"] - t["logprobs"]) * (t["x0"] - t["teacher_logprobs"]) for row in rows for t in row])


def loss(rows, knobs, version):
    return knobs.rl_loss_weight * policy(rows, knobs, version) + knobs.distill_loss_weight * reverse_kl(rows)
