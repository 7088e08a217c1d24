"""One side of ``train_step.py``: TRL's GRPOTrainer and SFTTrainer. Runs in .peers/trl. Prints one JSON line."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def reward(completions: list[str], **_: Any) -> list[float]:
    """The same as the reward file of the areno side."""
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


def main() -> None:
    settings = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    ends: list[float] = []
    generation: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])

    rows = [json.loads(line) for line in (Path(settings["folder"]) / "data.jsonl").read_text().splitlines()]
    shared: dict[str, Any] = {
        "output_dir": settings["run_dir"],
        "max_steps": settings["steps"],
        "learning_rate": 1e-5,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "tensorboard",
        "disable_tqdm": True,
        "gradient_checkpointing": settings["checkpointing"],
        "per_device_train_batch_size": settings["rows"],
    }
    model = settings["model"]
    trainer: Any
    if settings["algo"] == "grpo":
        config = GRPOConfig(
            **shared,
            num_generations=settings["samples"],
            max_completion_length=settings["new_tokens"],
            generation_kwargs={"min_new_tokens": settings["new_tokens"]},
            temperature=1.0,
            shuffle_dataset=False,
        )
        data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()])
        inner = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = time.perf_counter()
            out = inner(inputs)
            generation.append(time.perf_counter() - began)
            return out

        trainer._generate_and_score_completions = timed
    else:
        data = Dataset.from_list([{"prompt": row["prompt"], "completion": row["response"]} for row in rows])
        config = SFTConfig(**shared, max_length=1024, completion_only_loss=True)
        trainer = SFTTrainer(model=model, args=config, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    print(
        json.dumps(
            {
                "seconds": [b - a for a, b in itertools.pairwise(ends)][settings["warmup"] - 1 :],
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "response_len": lengths[-1] if lengths else None,
                "split": {"rollout_and_reward": generation[settings["warmup"] :]} if generation else {},
            }
        )
    )


if __name__ == "__main__":
    main()
