"""The saved state of an optimizer whose parameters are on several stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.engine.parallel.peers import Peers

_MASTER = "master"


def whole_state(state: dict[str, Any], peers: Peers) -> dict[str, Any]:
    """The state over all parameters, on the first rank, from what each stage has saved; other ranks get only their stage's."""
    if peers.pipeline.size == 1:
        return state
    parts: dict[str, Tensor] = {}
    if peers.heads:
        for index, name in enumerate(state["names"]):
            for key, value in state["adam"].get(index, {}).items():
                parts[f"{key} {name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        parts |= {f"{_MASTER} {name}": value for name, value in state["masters"].items()}
    names = [name for names in peers.pipeline.everyone(state["names"]) for name in names]
    gathered = peers.pipeline.to_first(parts)
    if not peers.first:
        return state
    found: dict[str, dict[str, Any]] = {name: {} for name in names}  # a tied one is on two stages, alike
    masters: dict[str, Tensor] = {}
    for entry, value in gathered.items():
        key, _, name = entry.partition(" ")
        if key == _MASTER:
            masters[name] = value
        else:
            found[name][key] = int(value) if key == "step" and state["moments"] == "8bit" else value
    adam = {index: entries for index, entries in enumerate(found.values()) if entries}
    return state | {"names": list(found), "adam": adam, "masters": masters}
