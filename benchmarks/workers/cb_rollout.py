"""One side of ``rollout.py``: continuous batching of transformers. Prints one JSON line.

One manager serves all passes, with pages for every sequence at once, so that nothing is evicted. The samples of a prompt
are forks of one request (``num_return_sequences``), its fastest way; they share their first token, which makes them no
independent samples, but costs no less. Without flash-attention it runs on SDPA with a mask over all pages, and compiling
its steps (``default_compile_level``) made them half as fast, so they are not compiled.
"""

from __future__ import annotations

import os
import time
from typing import Any

import side

os.environ.update({**side.SPIN, **os.environ})

PAGE = 64
MOST_PREFILL = 2048  # tokens of a step; the mask has a row for each


def main() -> None:
    given = side.settings()
    import torch
    import transformers as tf
    from transformers.generation import ContinuousBatchingConfig

    torch.set_num_threads(given.threads)
    tf.logging.set_verbosity_error()
    began = time.perf_counter()
    model: Any = tf.AutoModelForCausalLM.from_pretrained(
        given.model, attn_implementation="sdpa", dtype=getattr(torch, given.dtype)
    )
    model.to(given.device).eval()
    generation = tf.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(given.lengths),
        num_return_sequences=given.samples,
        eos_token_id=-1,
        pad_token_id=0,
    )
    pages = sum(-(-(given.prompts[i // given.samples] + n) // PAGE) + 1 for i, n in enumerate(given.lengths))
    config = ContinuousBatchingConfig(
        return_logprobs=True,
        page_size=PAGE,
        num_blocks=pages,
        max_batch_tokens=max(len(given.lengths), min(sum(given.prompts), MOST_PREFILL)),
        seed=0,
    )
    manager = model.init_continuous_batching(generation, config)
    manager.start()
    load_s = time.perf_counter() - began

    def one_pass(prompts: side.Prompts, number: int) -> side.Samples:
        names = [f"{number}-{index}" for index in range(len(prompts))]
        for name, prompt, length in zip(names, prompts, given.prompt_lengths(), strict=True):
            manager.add_request(prompt, request_id=name, max_new_tokens=length)
        found: dict[str, Any] = {}
        while len(found) < len(given.lengths):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"the manager ended: {manager.background_thread_status.fatal_error}")
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                found[result.request_id] = result
        children = [[name, *(f"{name}__child#{i}" for i in range(given.samples - 1))] for name in names]
        return [(found[key].generated_tokens, found[key].logprobs) for keys in children for key in keys]

    how = f"transformers {tf.__version__}, torch {torch.__version__}, continuous batching, sdpa"
    side.measure(given, one_pass, how=how, load_s=load_s)
    manager.stop(block=True, hard_stop=True)


if __name__ == "__main__":
    main()
