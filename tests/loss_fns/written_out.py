"""The losses reimplemented as loops over Python floats: an independent reference for the tests.

Every function takes rows in the form of `Batch.rows`: one list of response tokens per sequence.
"""

from __future__ import annotations

import math


def kl(kind, new, ref):
    d = new - ref
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d * d / 2
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(x) - x - 1, -10.0), 10.0)


def clipped(ratio, advantage, low, high, dual=math.inf):
    limited = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * advantage, -limited * advantage)
    return min(loss, -dual * advantage) if advantage < 0 and dual < math.inf else loss


def ratio_of(difference):
    return math.exp(min(max(difference, -20.0), 20.0))


def mean(numbers):
    return sum(numbers) / len(numbers) if numbers else 0.0


def averaged(per_row, loss_mean, max_tokens):
    """Mean of token losses, passed as one list per sequence."""
    if loss_mean == "token":
        return mean([loss for row in per_row for loss in row])
    if loss_mean == "sequence":
        return mean([mean(row) for row in per_row])
    return mean([sum(row) / max_tokens for row in per_row])


def grpo(rows, low, high, dual=math.inf, loss_mean="token", max_tokens=None, kl_coef=0.0, kind="k3"):
    def token(t):
        policy = clipped(ratio_of(t["x"] - t["logprobs"]), t["advantages"], low, high, dual)
        return policy + kl_coef * kl(kind, t["x"], t["ref_logprobs"])

    return averaged([[token(t) for t in row] for row in rows], loss_mean, max_tokens)


def gspo(rows, low, high, kl_coef=0.0, kind="k3"):
    losses = []
    for row in rows:
        ratio = ratio_of(mean([t["x"] - t["logprobs"] for t in row]))
        policy = clipped(ratio, mean([t["advantages"] for t in row]), low, high)
        losses.append(policy + kl_coef * mean([kl(kind, t["x"], t["ref_logprobs"]) for t in row]))
    return mean(losses)


def gmpo(rows, eps):
    """The geometric mean of the clipped ratios, as in the paper (arXiv:2507.20673, eq. 4)."""
    losses = []
    for row in rows:
        advantage = mean([t["advantages"] for t in row])
        sign = 1 if advantage > 0 else -1
        product = 1.0
        for t in row:
            ratio = math.exp(t["x"] - t["logprobs"])
            limited = min(max(ratio, math.exp(-eps)), math.exp(eps))
            product *= min(ratio**sign, limited**sign) ** sign
        losses.append(-advantage * product ** (1 / max(len(row), 1)))
    return mean(losses)


def gmpo_clipped(rows, eps):
    """The share of the tokens whose ratio is clipped; a sequence with advantage 0 has no gradient to clip."""
    flags = []
    for row in rows:
        advantage = mean([t["advantages"] for t in row])
        gaps = [t["x"] - t["logprobs"] for t in row]
        flags += [gap > eps if advantage > 0 else advantage < 0 and gap < -eps for gap in gaps]
    return mean(flags)


def ppo(rows, low, high, dual, kl_coef, kind, against):
    def token(t):
        policy = clipped(ratio_of(t["x"] - t["logprobs"]), t["advantages"], low, high, dual)
        return policy + kl_coef * kl(kind, t["x"], t[against])

    return mean([token(t) for row in rows for t in row])


def value(rows, eta, coef):
    def token(t):
        limited = t["values"] + min(max(t["x"] - t["values"], -eta), eta)
        return max((t["x"] - t["returns"]) ** 2, (limited - t["returns"]) ** 2)

    return coef * 0.5 * mean([token(t) for row in rows for t in row])


def dpo_deltas(rows, normalized=False):
    def log_ratio(row):
        total = sum(t["x"] for t in row) - sum(t["ref_logprobs"] for t in row)
        return total / max(len(row), 1) if normalized else total

    return [(log_ratio(rows[i]), log_ratio(rows[i + 1])) for i in range(0, len(rows), 2)]


def simpo(rows, beta, gamma):
    rewards = [beta * mean([t["x"] for t in row]) for row in rows]
    margins = [chosen - rejected for chosen, rejected in zip(rewards[0::2], rewards[1::2], strict=True)]
    return mean([math.log1p(math.exp(-(margin - gamma))) for margin in margins])


def dpo(rows, beta, smoothing=0.0, shape="sigmoid", normalized=False):
    def loss(delta):
        if shape == "sigmoid":
            return -math.log(1 / (1 + math.exp(-beta * delta)))
        if shape == "ipo":
            return (delta - 1 / (2 * beta)) ** 2
        return max(0.0, 1 - beta * delta)

    return mean([(1 - smoothing) * loss(c - r) + smoothing * loss(r - c) for c, r in dpo_deltas(rows, normalized)])
