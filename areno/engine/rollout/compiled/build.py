"""Build a decode step: ``python -m areno.engine.rollout.compiled.build SPEC.json PACKAGE.pt2 PARENT_PID``.

A process of its own, at the lowest priority: the run that asked goes on meanwhile, on the other cores. It knows the model's
configuration and no weights; memory for those is asked for and never touched. It ends when the process that asked does.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from transformers import AutoConfig, AutoModelForCausalLM

from areno.cache_folder import building_folder
from areno.engine.kernels.library import load_all
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.linear import use_fast_products
from areno.engine.rollout.compiled.spec import KERNELS, StepSpec
from areno.engine.rollout.compiled.traced import DecodeStep, example_inputs
from areno.engine.rollout.kv_cache import LayerShape

# Threads are chosen when the step runs. Weights and buffers stay where the engine has them, also the small ones that the
# compiler would write into the code: here they hold nothing.
_OPTIONS = {
    "cpp.dynamic_threads": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
}
# Sizes to trace with; none of them is kept.
_ROWS, _COLUMNS, _CACHED = 24, 80, 193


def build(spec: StepSpec, package: Path) -> None:
    """Trace, compile, and put the package in its place at once.

    Raises:
        RuntimeError: the configuration makes another architecture than the spec names, or tracing or compiling failed.
    """
    load_all(KERNELS)  # without them, PyTorch's operators are compiled in
    with building_folder(package) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        program = _export(_empty_model(spec, folder), spec)
        made = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(folder / package.name),
            inductor_configs=_OPTIONS,
        )
        os.replace(made, package)


def _empty_model(spec: StepSpec, folder: Path) -> CausalLM:
    (folder / "config.json").write_text(spec.config, encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, attn_implementation=spec.attention, dtype=getattr(torch, spec.dtype)
        )
    if type(module).__name__ != spec.architecture:
        raise RuntimeError(f"the configuration makes a {type(module).__name__}, not a {spec.architecture}")
    module.to_empty(device="cpu")
    module.tie_weights()
    use_fast_products(module)
    return CausalLM(module.eval().requires_grad_(False))


def _export(model: CausalLM, spec: StepSpec) -> ExportedProgram:
    loaded = all(kernel.loaded for kernel in KERNELS)
    step = DecodeStep(model, spec.layers, kernels=loaded)
    inputs = example_inputs(spec.layers, model.dtype, model.vocab_size, _ROWS, _COLUMNS, _CACHED)
    rows, columns, cached = Dim("rows", min=2), Dim("columns", min=8), Dim("cached", min=16)
    per_row: dict[int, Any] = {0: rows}
    table = [{0: rows, 2: cached} for _ in spec.layers]
    shapes = (*[per_row] * 3, {0: columns}, *[per_row] * 5, table, table)
    with torch.no_grad():
        return torch.export.export(
            step, inputs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Command line of the building process."""
    _end_with(int(sys.argv[3]))
    os.nice(19)
    torch.set_num_threads(1)
    try:
        fields = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        layers = tuple(LayerShape(**layer) for layer in fields.pop("layers"))
        build(StepSpec(layers=layers, **fields), Path(sys.argv[2]))
    except Exception as error:
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        sys.exit(f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    main()
