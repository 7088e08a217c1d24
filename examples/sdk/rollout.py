"""Generates inside a rollout session: a minimal program that uses the SDK.

python examples/sdk/rollout.py --model PATH_OR_REPO_ID
"""

import argparse
import asyncio

import areno
from areno import Trainer


async def main(model: str, prompt: str) -> None:
    """Open a trainer, generate one answer, and close the trainer."""
    trainer = Trainer(
        world_size=1,
        model_path=model,
        backend_type=areno.Areno,
        custom_config=areno.ArenoConfig(tp_size=1),
    )
    trainer.init()  # loads the model; the constructor only checks its arguments

    sampling = areno.SamplingParams(max_new_tokens=128)
    async with trainer.rollout_session(sampling_params=sampling, proxy=False):
        rollout = trainer.rollout_batch([prompt], n_samples=1, sampling_params=sampling)

    answer = rollout[0].sequences[0]
    print(f"{answer.text!r} ({len(answer.resp_tokens)} tokens, ended by {answer.finish_reason})")
    trainer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", default="Solve 12 * 13.")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.prompt))
