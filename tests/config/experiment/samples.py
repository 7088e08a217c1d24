"""Small experiments as trees of settings, for the tests in this folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from areno.config.experiment import DPOConfig, GRPOConfig, RWConfig, SFTConfig, config_from
from areno.config.experiment.tree import Override, apply_override
from areno.errors import UsageError

NAMES = {"experiment_name": "gsm8k-grpo", "trial_name": "trial0"}
MODEL = {"path": "some/model", "backend": "fsdp:d1", "optimizer": {"lr": 1e-4}}
RL: dict[str, Any] = {
    **NAMES,
    "gconfig": {"n_samples": 4, "max_new_tokens": 64},
    "rollout": {"backend": "areno:d1"},
    "actor": MODEL,
    "train_dataset": {"path": "rows.jsonl", "type": "rl", "batch_size": 8},
}
SFT: dict[str, Any] = {**NAMES, "actor": MODEL, "train_dataset": {"path": "rows.jsonl", "type": "sft"}}
RW = SFT | {"actor": MODEL | {"is_critic": True}, "train_dataset": {"path": "rows.jsonl", "type": "rw"}}
DPO = SFT | {"train_dataset": {"path": "rows.jsonl", "type": "dpo"}}
SAMPLES = {GRPOConfig: RL, SFTConfig: SFT, RWConfig: RW, DPOConfig: DPO}


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        apply_override(tree, Override(path, copy.deepcopy(value)))
    return tree


def accepted(changes, tree=RL, cls=GRPOConfig):
    return config_from(changed(tree, changes), cls)


def refused(changes, tree=RL, cls=GRPOConfig):
    with pytest.raises(UsageError) as caught:
        accepted(changes, tree, cls)
    return str(caught.value)


def rl(**changes: Any) -> GRPOConfig:
    """A GRPO experiment; ``__`` in a keyword stands for a dot."""
    return config_from(changed(RL, {name.replace("__", "."): value for name, value in changes.items()}), GRPOConfig)


def write(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(path)
