"""One side of ``rollout.py``: ``generate`` of transformers on one padded batch. Prints one JSON line.

Option ``compiled``: a static cache and a compiled decode step, as its documentation advises; else a growing cache.
Log-probs are taken at each step, which is faster than keeping all scores for ``compute_transition_scores`` and needs far
less memory. A row that has reached its length is padded until the longest has. A small model may be faster on one
thread than on all: a trial before the first pass decides.
"""

from __future__ import annotations

import os
import time
from typing import Any

import side

os.environ.update({**side.SPIN, **os.environ})

TRIAL_TOKENS = 8


def main() -> None:
    given = side.settings()
    import torch
    import transformers as tf

    torch.set_num_threads(given.threads)
    began = time.perf_counter()
    model: Any = tf.AutoModelForCausalLM.from_pretrained(
        given.model, attn_implementation="sdpa", dtype=getattr(torch, given.dtype)
    )
    model.to(given.device).eval()
    model.generation_config.eos_token_id = None
    load_s = time.perf_counter() - began
    limits = torch.tensor(given.lengths, device=given.device)
    kept: dict[str, Any] = {}
    if given.options["compiled"]:
        config = tf.CompileConfig()
        config._compile_all_devices = True  # without it only accelerators compile
        kept = {"cache_implementation": "static", "compile_config": config}

    class Recorder(tf.LogitsProcessor, tf.StoppingCriteria):
        """Sees the scores before each draw and the token after it; ends each row at its own length."""

        def __init__(self, start: int) -> None:
            self.start, self.scores, self.logprobs = start, torch.empty(0), []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] == self.start + len(self.logprobs):
                self.scores = scores
                return scores
            picked = self.scores.gather(1, input_ids[:, -1:]).squeeze(1)
            self.logprobs.append(picked - self.scores.logsumexp(1))
            return input_ids.shape[1] - self.start >= limits

    def generate(prompts: side.Prompts, new_tokens: int, **kept: Any) -> tuple[list[list[int]], list[list[float]]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=given.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=given.device)
        recorder = Recorder(width)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=given.samples,
                max_new_tokens=new_tokens,
                logits_processor=tf.LogitsProcessorList([recorder]),
                stopping_criteria=tf.StoppingCriteriaList([recorder]),
                pad_token_id=0,
                **kept,
            )
            return out[:, width:].tolist(), torch.stack(recorder.logprobs, 1).tolist()

    def one_pass(prompts: side.Prompts, number: int) -> side.Samples:
        torch.manual_seed(number)
        tokens, logprobs = generate(prompts, max(given.lengths), **kept)
        return [(t[:n], p[:n]) for t, p, n in zip(tokens, logprobs, given.lengths, strict=True)]

    threads = given.threads
    if given.device == "cpu":
        threads = side.fastest_threads(given, lambda: generate(given.draw(-1), TRIAL_TOKENS), torch.set_num_threads)
    cache = "static cache, compiled" if kept else "growing cache"
    how = f"transformers {tf.__version__}, torch {torch.__version__}, generate, sdpa, {cache}, {threads} threads"
    side.measure(given, one_pass, how=how, load_s=load_s)


if __name__ == "__main__":
    main()
