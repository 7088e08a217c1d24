"""Compile a decode step: ``python -m areno.engine.rollout.compiled.build SPEC.json PACKAGE.pt2 PARENT_PID``.

The build is a separate process at the lowest priority, so the parent process can continue. The build reads the model's
configuration, but not the weights. The build exits when the parent process exits.
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
from areno.engine.rollout.slot_cache import LayerShape

# Thread counts are chosen at run time. No weights or buffers are embedded, not even small ones that the compiler would inline,
# because the model's tensors are uninitialized.
_OPTIONS = {
    "cpp.dynamic_threads": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
}
# Sizes for tracing; all are dynamic in the result.
_ROWS, _COLUMNS, _CACHED = 24, 80, 193


def build(spec: StepSpec, package: Path) -> None:
    """Trace and compile the step, then move the compiled step to the path ``package`` atomically.

    Raises:
        RuntimeError: the configuration describes a different model class than ``spec.architecture``, or tracing or compiling
            failed.
    """
    load_all(KERNELS)  # without them, PyTorch's operators are compiled instead
    with building_folder(package) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        program = _export(_empty_model(spec, folder), spec)
        compiled = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(folder / package.name),
            inductor_configs=_OPTIONS,
        )
        os.replace(compiled, package)


def _empty_model(spec: StepSpec, folder: Path) -> CausalLM:
    (folder / "config.json").write_text(spec.config, encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(
            config, attn_implementation=spec.attention, dtype=getattr(torch, spec.dtype)
        )
    if type(module).__name__ != spec.architecture:
        raise RuntimeError(
            f"the configuration describes a model of class {type(module).__name__}, but the loaded model has class "
            f"{spec.architecture}"
        )
    module.to_empty(device="cpu")
    module.tie_weights()
    use_fast_products(module)
    return CausalLM(module.eval().requires_grad_(False))


def _export(model: CausalLM, spec: StepSpec) -> ExportedProgram:
    step = DecodeStep(model, spec.layers, kernels=all(kernel.loaded for kernel in KERNELS))
    inputs = example_inputs(spec.layers, model.dtype, model.vocab_size, _ROWS, _COLUMNS, _CACHED)
    rows, columns, cached = Dim("rows", min=2), Dim("columns", min=8), Dim("cached", min=16)
    per_row: dict[int, Any] = {0: rows}
    table = [{0: rows, 2: cached} for _ in spec.layers]
    shapes = (*[per_row] * 3, {0: columns}, *[per_row] * 5, table, table)
    with torch.no_grad():
        return torch.export.export(
            step, inputs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
        )


def _exit_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Entry point of the build process."""
    _exit_with(int(sys.argv[3]))
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
