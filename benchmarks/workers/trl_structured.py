"""TRL on the task of ``areno quickstart --real``: the same model, prompts, reward and batch, stopped by the clock.

Settings: ``model``, ``task`` (its folder), ``output``, ``minutes`` of training, ``seed``, ``threads``, ``microbatch``,
``checkpointing``, ``weights`` of the reward's parts, and options of areno's run by their names. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path[:0] = [
        settings["task"],
        str(Path(__file__).parents[2]),
    ]  # the reward names areno's types, which need no more
    import torch
    import trl

    torch.set_num_threads(settings["threads"])
    import reward as task_reward
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    exact: list[float] = []

    def reward(completions: list[Any], solutions: list[list[str]], **_: Any) -> list[float]:
        pairs = zip(completions, solutions, strict=True)
        parts = [task_reward.reward_parts(answer[-1]["content"], right[0]) for answer, right in pairs]
        exact.append(sum(part["exact"] for part in parts) / len(parts))
        return [sum(weight * part[name] for name, weight in settings["weights"].items()) for part in parts]

    class Clock(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = time.perf_counter() - self.began > 60 * settings["minutes"]

    rows = [json.loads(line) for line in (Path(settings["task"]) / "train.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=settings["output"],
        max_steps=1000,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        temperature=settings["temperature"],
        num_generations=settings["n_samples"],
        max_completion_length=settings["max_new_tokens"],
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["batch_size"] * settings["n_samples"] // settings["microbatch"],
        gradient_checkpointing=settings["checkpointing"],
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        seed=settings["seed"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": row["prompt"], "solutions": row["solutions"]} for row in rows])
    clock = Clock()
    trainer = GRPOTrainer(
        model=settings["model"], reward_funcs=reward, args=config, train_dataset=data, callbacks=[clock]
    )
    trainer.train()
    seconds = time.perf_counter() - clock.began
    trainer.save_model(settings["output"])
    found = {"steps": trainer.state.global_step, "seconds": round(seconds, 1), "exact_of_each_batch": exact}
    print(json.dumps(found | {"how": f"trl {trl.__version__}, torch {torch.__version__}"}))


if __name__ == "__main__":
    main()
