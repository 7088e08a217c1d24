"""One rollout and one GSPO update, with every stage written out: prompt, samples, rewards, advantages, rows and loss.

    python examples/sdk/gspo_step.py --model PATH_OR_REPO_ID --data gsm8k_train.jsonl

The data file has one JSON object per line with the keys `question` and `answer`, as in GSM8K.
"""

import argparse
import asyncio
from functools import partial

from datasets import load_dataset

import areno
from areno import SamplingParams, Trainer, TrainSequence
from areno.loss_fns import gspo_loss_fn


def normalized(rewards: list[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / max(deviation, 1e-6) for reward in rewards]


async def main(model: str, data: str) -> None:
    """Run one step on the first problem of the data file."""
    trainer = Trainer(world_size=1, model_path=model, backend_type=areno.Areno, custom_config=areno.ArenoConfig())
    trainer.init()
    tokenizer = trainer.get_tokenizer()

    row = load_dataset("json", data_files=data, split="train[0:1]")[0]
    target = row["answer"].rpartition("####")[2].strip()
    prompt_tokens = tokenizer.encode(f"Solve the problem; put the final answer in \\boxed{{}}.\n\n{row['question']}\n")
    sampling = SamplingParams(max_new_tokens=128, temperature=1.0)

    async with trainer.rollout_session(sampling_params=sampling, proxy=False):
        rollout = trainer.rollout_token_batch([prompt_tokens], n_samples=4, sampling_params=sampling)[0]

    rewards = [float(target in sequence.text) for sequence in rollout.sequences]
    rows = []
    for sequence, reward, advantage in zip(rollout.sequences, rewards, normalized(rewards), strict=True):
        prompt, response = len(prompt_tokens), len(sequence.resp_tokens)
        rows.append(
            TrainSequence(
                prompt_mask=[True] * prompt + [False] * response,
                tokens=prompt_tokens + sequence.resp_tokens,
                logprobs=[0.0] * prompt + sequence.resp_logprobs,
                advantages=[0.0] * prompt + [advantage] * response,
                reward=reward,
                eos_token_id=tokenizer.eos_token_id,
            )
        )

    stats = trainer.train(rows, partial(gspo_loss_fn, clip_eps=3.0e-4), mini_bs=4)
    print(stats)
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.data))
