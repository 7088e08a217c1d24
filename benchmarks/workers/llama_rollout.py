"""One side of ``real_model.py``: llama.cpp, through the server in the wheel ``xllamacpp``. Prints one JSON line.

Every sample has a slot of its own, the samples of a prompt come from one request (``n``), so that their prompt is computed
once, and nothing but the temperature shapes what is sampled. Asking it for log-probs makes it slower, so the timed passes go
without, and the last one is run again with them: they show that it samples as the others do.

Options: ``gguf``, the model as a file of the same precision, and ``cache``, the precision of keys and values, if another.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import side

CELLS = 256  # the cache of a sequence is a multiple of this


def cache_type(settings: side.Settings) -> str:
    """What ggml calls the precision of keys and values."""
    own = {"float32": "F32", "bfloat16": "BF16"}[settings.dtype]
    return str(settings.options.get("cache", own))


def make_server(settings: side.Settings) -> Any:
    """The server, with a slot for each sample and room for its prompt and all its tokens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings.options["gguf"]
    params.n_parallel = len(settings.lengths)
    params.n_ctx = len(settings.lengths) * -(-settings.context // CELLS) * CELLS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{cache_type(settings)}"]
    params.fit_params = False  # it would shrink the context
    params.verbosity = -1
    return xllamacpp.Server(params)


def ask(server: Any, settings: side.Settings, prompt: list[int], length: int, seed: int, logprobs: int) -> list[Any]:
    """All samples of one prompt; each was found complete."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "n": settings.samples,
        "max_tokens": length,
        "ignore_eos": True,
        "seed": seed,
        "temperature": 1.0,
        "samplers": ["temperature"],
        "logprobs": logprobs,
    }
    answer = server.handle_completions(body)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    assert len(answer.get("choices", [])) == settings.samples, f"no answer: {answer}"
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length", f"ended before {length} tokens: {choice['finish_reason']}"
    return list(answer["choices"])


def main() -> None:
    settings = side.settings()
    import xllamacpp

    began = time.perf_counter()
    server = make_server(settings)
    load_s = time.perf_counter() - began

    def one_pass(number: int, logprobs: int) -> tuple[float, list[Any]]:
        prompts, lengths = settings.draw(number), settings.prompt_lengths()
        seeds = [number * 100_000 + index * settings.samples for index in range(len(prompts))]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda *each: ask(server, settings, *each, logprobs), prompts, lengths, seeds)
            choices = [choice for answer in answers for choice in answer]
        return time.perf_counter() - began, choices

    first_s, *seconds = [one_pass(number, 0)[0] for number in range(settings.passes + 1)]
    _, choices = one_pass(settings.passes, 1)
    # A character of several tokens has one entry, so there may be fewer than tokens.
    logprobs = [token["logprob"] for choice in choices for token in choice["logprobs"]["content"]]
    assert all(math.isfinite(value) and value < 1e-4 for value in logprobs), "a log-prob is not one"
    how = f"llama.cpp of xllamacpp {version('xllamacpp')}, cache {cache_type(settings)}, no log-probs, "
    result = {
        "how": how + xllamacpp.get_system_info().strip(),
        "load_s": load_s,
        "first_pass_s": first_s,
        "seconds": seconds,
        "compile_s": 0.0,
        "tokens": sum(settings.lengths),
        "mean_logprob": statistics.mean(logprobs),
        "peak_mib": side.peak_mib(),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
