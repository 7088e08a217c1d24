"""Fixtures that several tests of the engine share."""

from __future__ import annotations

import pytest
import torch

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.kernels.library import KernelLibrary
from areno.engine.model.adapter import AdapterOptions
from areno.engine.train.optimizer import OptimizerOptions
from tests.support.adapters import LR


@pytest.fixture
def open_engine(tiny_checkpoint):
    """Engines with an adapter of rank 4 on a tiny llama."""
    engines = []

    def make(path=tiny_checkpoint, trains="policy", dtype=torch.float32, decode="eager", **options):
        adapter = AdapterOptions.of({"rank": 4, **options}, "lora")
        optimizer = OptimizerOptions(lr=LR, weight_decay=0.1, eps=1e-6)
        config = EngineConfig(optimizer=optimizer, adapter=adapter, trains=trains, dtype=dtype, decode=decode)
        engines.append(Engine(str(path), config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module", autouse=True)
def _built_kernel(request):
    """The ``KERNEL`` that a module tests, built once for all tests of this run."""
    kernel = getattr(request.module, "KERNEL", None)
    if isinstance(kernel, KernelLibrary):
        assert kernel.build() == ""
        assert kernel.load()
