"""One side of ``rollout.py``: ``generate`` of transformers on one padded batch. Prints one JSON line."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as areno sets it; the default is far slower on a shared machine


def main() -> None:
    settings = json.loads(sys.argv[1])
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    rng = random.Random(1)
    prompts = torch.tensor([[rng.randrange(2, 500) for _ in range(n)] for n in settings["prompts"]])
    lengths = torch.tensor(settings["lengths"])
    start = prompts.shape[1]

    class Lengths(StoppingCriteria):
        """Each row ends at a length of its own."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - start >= lengths

    seconds = []
    for number in range(settings["passes"] + 1):
        torch.manual_seed(number)
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=settings["samples"],
                max_new_tokens=int(lengths.max()),
                stopping_criteria=StoppingCriteriaList([Lengths()]),
                output_scores=True,
                return_dict_in_generate=True,
                pad_token_id=0,
            )
            logprobs = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        seconds.append(time.perf_counter() - began)
    generated = out.sequences.shape[1] - start
    assert generated == int(lengths.max())
    assert logprobs.shape == (len(lengths), generated)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"first": seconds[0], "seconds": seconds[1:], "tokens": int(lengths.sum()), "peak_mib": peak}))


if __name__ == "__main__":
    main()
