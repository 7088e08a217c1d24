"""One side of ``rollout.py``: areno's rollout loop. Prints one JSON line.

Option ``decode``: ``eager`` or ``compiled``, which builds the decode step while loading; on a GPU, which has no such
build, that means the engine's own choice. Option ``without``: kernels of ``areno/engine/kernels`` that are left out, by name;
PyTorch's operators stand in for them.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import side

import areno  # before torch: areno sets how long idle threads spin


def main() -> None:
    given = side.settings()
    import torch

    from areno.engine.engine import Engine, EngineConfig  # both from here, as commits have it that this is run with
    from areno.engine.rollout.compiled.switch import DecodeSwitch
    from areno.types import Request, SamplingParams

    torch.set_num_threads(given.threads)
    leave_out(set(given.options.get("without", ())))
    prepare, compile_s = DecodeSwitch.prepare, 0.0

    def timed(switch: DecodeSwitch) -> None:
        nonlocal compile_s
        began = time.perf_counter()
        prepare(switch)
        compile_s += time.perf_counter() - began

    DecodeSwitch.prepare = timed  # type: ignore[method-assign]
    decode = "auto" if given.options["decode"] == "compiled" and given.device != "cpu" else given.options["decode"]
    began = time.perf_counter()
    config = EngineConfig(
        device=torch.device(given.device),
        dtype=getattr(torch, given.dtype),
        trains="nothing",
        max_running=len(given.lengths),
        decode=decode,
    )
    engine = Engine(given.model, config)
    load_s = time.perf_counter() - began - compile_s

    def one_pass(prompts: side.Prompts, number: int) -> side.Samples:
        requests = []
        for index, (prompt, length) in enumerate(zip(prompts, given.prompt_lengths(), strict=True)):
            sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
            seeds = [number * 100_000 + index * given.samples + s for s in range(given.samples)]
            requests.append(Request(prompt, sampling, seeds))
        results = [future.result() for future in engine.submit(requests)]
        return [(s.resp_tokens, s.resp_logprobs) for result in results for s in result.sequences]

    how = f"areno {areno.__version__}, torch {torch.__version__}, decode {decode}"
    side.measure(given, one_pass, how=how, load_s=load_s, load_compile_s=compile_s)
    engine.close()


def leave_out(kernels: set[str]) -> None:
    """Replace kernels in this process, which then builds its compiled step itself."""
    if not kernels:
        return
    from torch import nn

    from areno.engine.model import linear
    from areno.engine.rollout.compiled import build, switch, traced

    def product(layer: nn.Linear, rows: Any) -> Any:
        large = linear._wide() and layer.weight.numel() >= linear._LEAST_WEIGHT
        return (linear._multiply if large else nn.functional.linear)(rows, layer.weight, layer.bias)

    if "row_product" in kernels:
        linear.FastLinear._row_product = product  # type: ignore[method-assign]
    if "decode_attention" in kernels:
        traced.takes = lambda *_: False
    if "plain_draw" in kernels:
        traced.draw_kernel = SimpleNamespace(plain_draw=lambda *given: traced.plain_draw(*given[:4]))  # type: ignore[assignment]
    switch._Build = lambda spec: SimpleNamespace(  # type: ignore[assignment,misc]
        wait=lambda: build.build(spec, spec.path()) or "", stop=lambda: None
    )


if __name__ == "__main__":
    main()
