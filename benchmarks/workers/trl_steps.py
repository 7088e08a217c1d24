"""One side of ``train_step.py`` and ``real_model.py``: TRL's GRPOTrainer and SFTTrainer. Prints one JSON line.

``options`` are those of the trainer's configuration besides. With ``chat``, rows are conversations, which TRL puts through
the tokenizer's template, as areno does with every text.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def reward(completions: list[Any], **_: Any) -> list[float]:
    """The same as the reward file of the areno side."""
    texts = [answer if isinstance(answer, str) else answer[-1]["content"] for answer in completions]
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in texts]


def peak_mib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def turn(role: str, text: str, chat: bool) -> Any:
    """One text of a row, as a message of a conversation or as it is."""
    return [{"role": role, "content": text}] if chat else text


def main() -> None:
    settings = json.loads(sys.argv[1])
    import torch
    import trl

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    ends: list[float] = []
    generation: list[float] = []
    lengths: list[float] = []
    tokens: list[float] = [0]

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])
            if "num_tokens" in logs:
                tokens.append(logs["num_tokens"])

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
        "model_init_kwargs": {"dtype": settings.get("dtype", "float32")},
        **settings.get("options", {}),
    }
    model, chat = settings["model"], settings.get("chat", False)
    questions = [turn("user", row["prompt"], chat) for row in rows]
    base_mib = peak_mib()
    trainer: Any
    if settings["algo"] != "sft":
        config = GRPOConfig(
            **shared,
            num_generations=settings["samples"],
            max_completion_length=settings["new_tokens"],
            generation_kwargs={"min_new_tokens": settings["new_tokens"]},
            temperature=1.0,
            importance_sampling_level="sequence" if settings["algo"] == "gspo" else "token",
            shuffle_dataset=False,
        )
        data = Dataset.from_list([{"prompt": question} for question in questions])
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[Clock()])
        inner = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            began = time.perf_counter()
            out = inner(inputs)
            generation.append(time.perf_counter() - began)
            return out

        trainer._generate_and_score_completions = timed
    else:
        answers = [turn("assistant", row["response"], chat) for row in rows]
        pairs = zip(questions, answers, strict=True)
        data = Dataset.from_list([{"prompt": question, "completion": answer} for question, answer in pairs])
        config = SFTConfig(**shared, max_length=2048, completion_only_loss=True, train_sampling_strategy="sequential")
        trainer = SFTTrainer(model=model, args=config, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    print(
        json.dumps(
            {
                "seconds": [b - a for a, b in itertools.pairwise(ends)][settings["warmup"] - 1 :],
                "peak_mib": peak_mib(),
                "base_mib": base_mib,
                "how": f"trl {trl.__version__}, torch {torch.__version__}",
                "seq_len": (tokens[-1] - tokens[0]) / (len(tokens) - 1) / settings["rows"],
                "response_len": lengths[-1] if lengths else None,
                "split": {"rollout_and_reward": generation[settings["warmup"] :]} if generation else {},
            }
        )
    )


if __name__ == "__main__":
    main()
