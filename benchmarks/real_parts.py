"""What ``real_model.py`` can measure: its parts, and the sides that it compares in them."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import PEERS


@dataclass(frozen=True)
class Workload:
    """Rows of a step, or of a pass of a rollout.

    Attributes:
        prompts: number of different prompts; for SFT, number of rows.
        samples: samples per prompt.
        new_tokens: tokens of each sample; for SFT, the maximum of an answer.
        prompt_tokens: length that prompts are extended to; None leaves them unchanged.
    """

    prompts: int = 8
    samples: int = 8
    new_tokens: int = 64
    prompt_tokens: int | None = None

    def changed(self, values: dict[str, int]) -> Workload:
        """A copy with other numbers."""
        return replace(self, **values)


@dataclass(frozen=True)
class Part:
    """One thing to measure; ``algo`` is empty for a rollout alone."""

    algo: str
    sides: tuple[str, ...]
    workload: Workload = field(default_factory=Workload)

    @property
    def trains(self) -> bool:
        """Whether its processes run training steps."""
        return bool(self.algo)


@dataclass(frozen=True)
class Side:
    """One program to measure.

    Attributes:
        worker: script of ``benchmarks/workers`` for rollouts.
        trainer: the same for training steps.
        tree: which sources, if it is areno: ``here`` or ``against``.
        peer: name of its environment under .peers, if it has one.
        module: what its interpreter must be able to import.
        options: options of the worker; for training steps, those of ``areno train`` or of TRL's configuration.
        checkpointing: TRL's ``gradient_checkpointing``.
        microbatch: TRL's ``per_device_train_batch_size``; None takes all rows of a step at once.
    """

    worker: str = ""
    trainer: str = ""
    tree: str = ""
    peer: str = ""
    module: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = True
    microbatch: int | None = None

    def script(self, trains: bool) -> str:
        """The worker script."""
        return self.trainer if trains else self.worker

    def interpreter(self, args: argparse.Namespace) -> Path:
        """The interpreter of the command line, else that of its environment under .peers, else this one."""
        own = PEERS / self.peer / "bin" / "python"
        if self.peer in args.python:
            return Path(args.python[self.peer]).expanduser().absolute()
        return own if self.peer and own.exists() else Path(sys.executable)

    def missing(self, args: argparse.Namespace) -> str:
        """Why it cannot run on this machine; empty if it can."""
        if self.tree == "against" and not args.against:
            return "no --against COMMIT"
        python = self.interpreter(args)
        if not python.exists():
            return f"--python {self.peer}={python}: there is no such interpreter"
        if self.module and python == Path(sys.executable) and importlib.util.find_spec(self.module) is None:
            return f"not set up; run: bash benchmarks/peers.sh {self.peer}, or give --python {self.peer}=PATH"
        if self.module == "xllamacpp" and not args.gguf and not _writes_gguf():
            return "it needs the model as a GGUF file; give --gguf FILE"
        return ""

    def trl_options(self, rows: int) -> dict[str, Any]:
        """TRL's options for a step of ``rows`` rows."""
        if self.microbatch is None or rows % self.microbatch:
            return {}
        return {
            "per_device_train_batch_size": self.microbatch,
            "gradient_accumulation_steps": rows // self.microbatch,
        }


def _writes_gguf() -> bool:
    """Whether this areno can write the file, and has the package for it."""
    names = ("areno.engine.checkpoint.gguf_export", "gguf")
    return all(importlib.util.find_spec(name) is not None for name in names)


_OURS: dict[str, Any] = {"worker": "areno_rollout.py", "trainer": "areno_steps.py"}
_TRL: dict[str, Any] = {"trainer": "trl_steps.py", "peer": "trl", "module": "trl"}
_LLAMA: dict[str, Any] = {"worker": "llama_rollout.py", "peer": "llama", "module": "xllamacpp"}
SIDES = {
    "limit": Side("machine_limit.py", "machine_limit.py"),
    "areno": Side(**_OURS, tree="here"),
    "areno_lora": Side(**_OURS, tree="here", options={"lora_rank": 16}),
    "areno_compiled": Side(**_OURS, tree="here", options={"decode": "compiled"}),
    "areno_eager": Side(**_OURS, tree="here", options={"decode": "eager"}),
    "against": Side(**_OURS, tree="against"),
    "against_compiled": Side(**_OURS, tree="against", options={"decode": "compiled"}),
    "against_eager": Side(**_OURS, tree="against", options={"decode": "eager"}),
    "trl": Side(**_TRL),
    "trl_keep": Side(**_TRL, checkpointing=False),
    "trl_accumulate": Side(**_TRL, checkpointing=False, microbatch=8),
    "generate": Side("generate_rollout.py", options={"compiled": False}),
    "vllm": Side("vllm_rollout.py", peer="vllm", module="vllm"),
    "llama": Side(**_LLAMA),
    "llama_f16_cache": Side(**_LLAMA, options={"cache": "F16"}),
}

_TRL_SIDES = ("trl", "trl_keep", "trl_accumulate")
_STEPS = ("limit", "areno", "against", *_TRL_SIDES)
_ROLLOUTS = (
    *("limit", "areno_compiled", "areno_eager", "against_compiled", "against_eager"),
    *("generate", "vllm", "llama", "llama_f16_cache"),
)
_LONG_PROMPTS = Workload(2, 8, 64, prompt_tokens=1500)
_LONG_ANSWERS = Workload(2, 4, 1024)
_ROWS = Workload(16, 1, 1024)
PARTS = {
    "gspo": Part("gspo", ("limit", "areno", "against")),
    "grpo": Part("grpo", _STEPS),
    "sft": Part("sft", _STEPS, _ROWS),
    "rollout": Part("", _ROLLOUTS),
    "gspo-long-prompts": Part("gspo", _STEPS, _LONG_PROMPTS),
    "gspo-long-answers": Part("gspo", _STEPS, _LONG_ANSWERS),
    "rollout-long-prompts": Part("", _ROLLOUTS, _LONG_PROMPTS),
    "rollout-long-answers": Part("", _ROLLOUTS, _LONG_ANSWERS),
    "lora-grpo": Part("grpo", ("areno", "areno_lora")),
    "lora-sft": Part("sft", ("areno", "areno_lora"), _ROWS),
}
