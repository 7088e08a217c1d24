"""Run a compiled decode step in this process, with the engine's weights and KV cache."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areno.cache_folder import planted_problem
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.spec import KERNELS, StepSpec
from areno.engine.rollout.compiled.traced import DecodeStep, example_inputs
from areno.errors import EngineError, first_line

# Rounding differs in the last bits; a wrong step differs by orders of magnitude more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

_COLUMNS = 32  # cache columns that the validation step attends to


class StepPackage:
    """A compiled decode step that uses a model's weights. On loading, the step's results are compared with those of the model.

    The step and the model share the weights in memory, so the step sees in-place weight updates at once.

    Raises:
        EngineError: the compiled step cannot be loaded, needs weights that the model does not have, computes different results
            than the model, or may have been written by another user.
    """

    def __init__(self, path: Path, model: CausalLM, spec: StepSpec) -> None:
        self._step = DecodeStep(model, spec.layers)
        self._layers = spec.layers
        if problem := planted_problem(path):
            raise EngineError(problem)
        try:
            for kernel in KERNELS:
                kernel.load()
            # Uses the loader alone: importing torch._inductor takes seconds, for a compiler that loading does not need.
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
            self._bind()
        except (RuntimeError, TypeError, OSError, AttributeError) as error:
            path.unlink(missing_ok=True)  # the next run rebuilds it
            raise EngineError(
                f"the compiled decode step {path} could not be loaded, so the file has been removed: {first_line(error)}"
            ) from error
        self._validate()

    def __call__(self, *inputs: Tensor | list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`DecodeStep.forward`."""
        flat = [tensor for value in inputs for tensor in (value if isinstance(value, list) else [value])]
        logits, tokens, logprobs = self._loader.boxed_run(flat)
        return logits, tokens, logprobs

    def refresh(self) -> None:
        """Update the addresses of the weights in the compiled step. Call this method if weights may have moved in memory."""
        moved = [name for name, weight in self._weights.items() if weight.data_ptr() != self._lent[name].data_ptr()]
        for name in moved:
            self._lent[name].data = self._weights[name].detach()
        if moved:
            self._load()

    def close(self) -> None:
        """Release the weights. Afterwards, this object must not be called."""
        for tensor in self._lent.values():
            tensor.data = tensor.new_empty(0)

    def _bind(self) -> None:
        step = self._step
        named = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
        # An adapter wraps its layer, so the weight's name has one more component than in the traced step.
        available = {name.replace(".base_layer.", "."): tensor for name, tensor in named}
        names = self._loader.get_constant_fqns()
        missing = [name for name in names if name not in available]
        if missing:
            raise RuntimeError(
                f"the compiled step needs weights that the model does not have: {', '.join(missing[:3])}"
            )
        self._weights = {name: available[name] for name in names}
        self._lent = {name: weight.detach() for name, weight in self._weights.items()}
        self._load()

    def _load(self) -> None:
        """Pass the weight tensors to PyTorch's loader, which takes their addresses.

        PyTorch 2.13 never frees the loader's references to these tensors. Each call of this method therefore passes the same
        tensor objects, and :meth:`refresh` and :meth:`close` only assign to the ``data`` of these objects. A call then leaks
        only 8 KB. With new tensor objects, a call would leak the memory of all weights.
        """
        self._loader.load_constants(self._lent, use_inactive=False, check_full_update=True, user_managed=True)

    @torch.inference_mode()
    def _validate(self) -> None:
        """Check that the compiled step computes the same results as the uncompiled step.

        Both steps run with the same random inputs, each with its own copy of the cache. If the logits or the caches differ by
        more than rounding, raise EngineError.
        """
        model = self._step.model
        arguments: Any = example_inputs(self._layers, model.dtype, model.vocab_size, 16, _COLUMNS, cached=65)
        *inputs, keys, values = arguments
        if model.dtype != torch.float32:
            self._fill(inputs, keys, values)
        expected, actual = (
            [run(*inputs, *tables)[0], *tables[0], *tables[1]]
            for run in (self._step, self)
            for tables in [[[table.clone() for table in each] for each in (keys, values)]]
        )
        gap = max(
            float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1e-6))
            for a, b in zip(expected, actual, strict=True)
        )
        if not gap <= _TOLERANCE.get(model.dtype, 5e-2):
            raise EngineError(
                f"the result of the compiled decode step differs from the model's result by {gap:.1e} (relative)"
            )

    def _fill(self, inputs: list[Any], keys: list[Tensor], values: list[Tensor]) -> None:
        """Let the model process random tokens, and write the resulting keys and values to the first cache columns.

        With random numbers as keys and values, each layer of a trained model would amplify the rounding differences between
        the compiled and the uncompiled step. In 16-bit dtypes, the logits of the two steps would then differ by up to a third
        of the largest logit, even if the compiled step only replaced PyTorch operators with equivalent ones.
        """
        tokens, random = inputs[0], torch.Generator().manual_seed(1)
        for column in range(_COLUMNS):
            fed = torch.randint(0, self._step.model.vocab_size, tokens.shape, generator=random)
            at = torch.full_like(tokens, column)
            self._step(fed, at, at, *inputs[3:], keys, values)
