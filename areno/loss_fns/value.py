"""The critic's loss: squared error against the returns (Schulman et al. 2017, arXiv:1707.06347), with value clipping."""

import torch
from torch import Tensor

from areno.loss_fns.loss_interface import DataPack, in_float, required
from areno.loss_fns.units import Names, Quantity, mean_loss, means

_REMEDY = "set `values` and `returns` in every row, for example with areno.loss_fns.gae.fill_gae"


_NAMES: Names = {
    "value_loss": ("loss", "mean"),
    **means(
        "",
        "value_clipfrac",
        "value_mse",
        "value_pred_mean",
        "value_target_mean",
        "old_value_mean",
        "value_abs_error_mean",
    ),
}
CRITIC_NAMES: Names = {
    "critic_loss": ("loss", "range"),
    "clip_ratio": ("value_clipfrac", "range"),
    "new_value": ("value_pred_mean", "range"),
    "old_value": ("old_value_mean", "range"),
    "target_value": ("value_target_mean", "range"),
}
"""Names of the critic's statistics in ``areno run``."""


@mean_loss("token", _NAMES)
def value_loss_fn(
    data_pack: DataPack, values: Tensor, cliprange_value: float = 0.5, value_loss_coef: float = 0.5
) -> dict[str, Quantity]:
    """Compute L = coef / 2 * mean over tokens of max((V - R)^2, (V_clip - R)^2).

    coef is ``value_loss_coef``, V is the current value (``values``), V_old is the value before the update, and R is the
    return. V_clip is V_old + clip(V - V_old, -eta, eta), where eta is ``cliprange_value``. A token has no gradient if
    abs(V - V_old) > eta and abs(V - R) < abs(V_clip - R): the maximum then selects the term with V_clip, which is constant.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_values`` and ``packed_returns``.
        values: V, the value of the state before each action, one entry per action.
        cliprange_value: eta, the maximum difference between V_clip and V_old, in units of reward.
        value_loss_coef: weight of the loss.

    Returns:
        Loss and the statistics value_loss (the loss), value_clipfrac, value_mse, value_pred_mean, value_target_mean,
        old_value_mean and value_abs_error_mean. ``value_loss_fn.units`` returns these
        quantities for each token, before averaging, with the key ``loss`` instead of value_loss.

    Raises:
        ValueError: ``cliprange_value`` is not above 0, or the pack lacks values or returns.
    """
    if not cliprange_value > 0:
        raise ValueError(f"cliprange_value must be above 0, got {cliprange_value}")
    mask = data_pack["packed_response_mask"]
    values = torch.where(mask, in_float(values), 0.0)
    old = torch.where(mask, in_float(required(data_pack, "packed_values", "value_loss_fn", _REMEDY)), 0.0)
    target = torch.where(mask, in_float(required(data_pack, "packed_returns", "value_loss_fn", _REMEDY)), 0.0)
    error = (values - target).square()
    clipped_error = (old + (values - old).clamp(-cliprange_value, cliprange_value) - target).square()
    losses = 0.5 * value_loss_coef * torch.maximum(error, clipped_error)
    moved = (values - old).abs() > cliprange_value
    quantities = {
        "loss": losses,
        "value_clipfrac": (moved & (clipped_error > error)).float(),
        "value_mse": error,
        "value_pred_mean": values,
        "value_target_mean": target,
        "old_value_mean": old,
        "value_abs_error_mean": (values - target).abs(),
    }
    return {name: Quantity(each, mask) for name, each in quantities.items()}
