"""One side of ``rollout.py``: areno's rollout loop. Prints one JSON line."""

from __future__ import annotations

import json
import random
import resource
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    import torch

    import areno.engine.engine as engines  # before torch: areno sets how long idle threads spin
    from areno.types import Request, SamplingParams

    torch.set_num_threads(settings["threads"])
    lengths, samples = settings["lengths"], settings["samples"]
    engine = engines.Engine(settings["model"], engines.EngineConfig(trains="nothing", max_running=len(lengths)))
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 500) for _ in range(n)] for n in settings["prompts"]]
    seconds = []
    for number in range(settings["passes"] + 1):
        requests = []
        for index, prompt in enumerate(prompts):
            own = lengths[index * samples : (index + 1) * samples]
            assert len(set(own)) == 1
            sampling = SamplingParams(max_new_tokens=own[0], ignore_eos=True)
            seeds = [number * 10_000 + index * samples + s for s in range(samples)]
            requests.append(Request(prompt, sampling, seeds))
        began = time.perf_counter()
        results = [future.result() for future in engine.submit(requests)]
        seconds.append(time.perf_counter() - began)
    sequences = [s for result in results for s in result.sequences]
    assert all(len(s.resp_logprobs) == len(s.resp_tokens) for s in sequences)
    engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sum(len(s.resp_tokens) for s in sequences)
    print(json.dumps({"first": seconds[0], "seconds": seconds[1:], "tokens": tokens, "peak_mib": peak}))


if __name__ == "__main__":
    main()
