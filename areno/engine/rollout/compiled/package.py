"""A built decode step in this process: it computes with the engine's own weights and writes to the engine's own cache."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areno.cache_folder import planted_problem
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.spec import KERNELS, StepSpec
from areno.engine.rollout.compiled.traced import DecodeStep, example_inputs
from areno.errors import EngineError

# Rounding differs in the last bits; anything that computes something else is orders of magnitude away.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

_COLUMNS = 32  # of the cache, which the step that is compared may look at


class StepPackage:
    """Loads what :mod:`build` made, lends it a model's weights, and compares it with the step it was made from.

    The weights are shared, not copied, so training needs to tell it nothing.

    Raises:
        EngineError: it cannot be loaded, lacks weights, or computes something else than the model; or another user may have
            written it.
    """

    def __init__(self, path: Path, model: CausalLM, spec: StepSpec) -> None:
        self._step = DecodeStep(model, spec.layers)
        self._layers = spec.layers
        if problem := planted_problem(path):
            raise EngineError(problem)
        try:
            for kernel in KERNELS:
                kernel.load()
            # The loader itself: torch._inductor would import its compiler, which takes seconds and is not needed here.
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
            self._bind()
        except (RuntimeError, TypeError, OSError, AttributeError) as error:
            path.unlink(missing_ok=True)  # the next run builds it anew
            raise EngineError(f"{path} could not be loaded and was removed: {str(error).splitlines()[0]}") from error
        self._prove()

    def __call__(self, *inputs: Tensor | list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`DecodeStep.forward`."""
        flat = [tensor for value in inputs for tensor in (value if isinstance(value, list) else [value])]
        logits, tokens, logprobs = self._loader.boxed_run(flat)
        return logits, tokens, logprobs

    def refresh(self) -> None:
        """Follow weights that have been given other memory; to be called before the first step after they may have."""
        moved = [name for name, own in self._own.items() if own.data_ptr() != self._lent[name].data_ptr()]
        for name in moved:
            self._lent[name].data = self._own[name].detach()
        if moved:
            self._load()

    def close(self) -> None:
        """Let go of the weights; no step may follow."""
        for tensor in self._lent.values():
            tensor.data = tensor.new_empty(0)

    def _bind(self) -> None:
        step = self._step
        named = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
        # A weight that has an adapter lies one level deeper than where the step was traced.
        mine = {name.replace(".base_layer.", "."): tensor for name, tensor in named}
        names = self._loader.get_constant_fqns()
        lacking = [name for name in names if name not in mine]
        if lacking:
            raise RuntimeError(f"it needs the constants {', '.join(lacking[:3])}, which the model does not have")
        self._own = {name: mine[name] for name in names}
        self._lent = {name: own.detach() for name, own in self._own.items()}
        self._load()

    def _load(self) -> None:
        """Tell the loader where the weights are.

        PyTorch 2.13 never frees its references to tensors that it does not own. So it always gets the same tensor objects,
        whose memory :meth:`refresh` and :meth:`close` exchange: what remains of each call is 8 KB, not the weights.
        """
        self._loader.load_constants(self._lent, use_inactive=False, check_full_update=True, user_managed=True)

    @torch.inference_mode()
    def _prove(self) -> None:
        """One random step here and there, each on a copy of a cache made for it: logits, and the cache after the step."""
        model = self._step.model
        made: Any = example_inputs(self._layers, model.dtype, model.vocab_size, 16, _COLUMNS, cached=65)
        *inputs, keys, values = made
        if model.dtype != torch.float32:
            self._fill(inputs, keys, values)
        expected, got = (
            [run(*inputs, *tables)[0], *tables[0], *tables[1]]
            for run in (self._step, self)
            for tables in [[[table.clone() for table in each] for each in (keys, values)]]
        )
        gap = max(
            float((a.float() - b.float()).abs().max() / a.float().abs().max().clamp(min=1e-6))
            for a, b in zip(expected, got, strict=True)
        )
        if not gap <= _TOLERANCE.get(model.dtype, 5e-2):
            raise EngineError(f"the compiled decode step differs from the model by {gap:.1e}")

    def _fill(self, inputs: list[Any], keys: list[Tensor], values: list[Tensor]) -> None:
        """Let the model itself write the columns that the step reads.

        Over random keys and values, each layer of a trained model amplifies differences of rounding: in 16 bits up to a third
        of the largest logit, with PyTorch's operators too.
        """
        tokens, random = inputs[0], torch.Generator().manual_seed(1)
        for column in range(_COLUMNS):
            fed = torch.randint(0, self._step.model.vocab_size, tokens.shape, generator=random)
            at = torch.full_like(tokens, column)
            self._step(fed, at, at, *inputs[3:], keys, values)
