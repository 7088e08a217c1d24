"""Choose how decode steps run: with PyTorch's operators, with areno's kernels, or compiled.

On a CPU, steps use areno's kernels if the model is large enough. The kernels are built once per machine, before the first step.
The build takes seconds. A compiled step avoids PyTorch's overhead between operators. This overhead is most of a step's time for
a tiny model, and 7 to 22 % for a model of 135 M parameters.

In mode ``auto``, a compiled step that is on disk is loaded at once. Otherwise, the step is compiled as soon as the expected
savings exceed the compile time, which is 40 seconds or more on one core. Compiling does not delay generation, because a
separate process at the lowest priority compiles the step. Decoding regularly checks whether the compilation has finished, and
then uses the compiled step. If the step cannot be compiled, a log line reports the reason, and decoding continues without a
compiled step. Compiled steps are cached on disk, so the next run of the same model uses the compiled step from the start.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import IO, Literal

from areno.cache_folder import ScratchFolder
from areno.engine.kernels.library import compiler_missing, load_all
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.linear import use_row_products
from areno.engine.rollout.compiled.package import StepPackage
from areno.engine.rollout.compiled.spec import KERNELS, StepSpec
from areno.engine.rollout.compiled.traced import DecodeStep
from areno.engine.rollout.decode import DecodeBatch, EagerDecode, StepDecode
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.slot_cache import LayerShape, SlotCache
from areno.engine.rollout.threads import ThreadRule
from areno.errors import EngineError
from areno.python_process import python_command, search_path

logger = logging.getLogger("areno.engine.inference")

DecodeMode = Literal["auto", "eager", "compiled"]

# Measured on two cores: a build takes 42 s for 4 layers and 50 s for 8; a compiled step takes 0.25 to 0.9 of the time of an
# eager one without kernels, and 0.78 to 0.93 of an eager one with kernels.
BUILD_BASE_S, BUILD_LAYER_S = 34.0, 2.0
SAVED, SAVED_BESIDE_KERNELS = 0.5, 0.07
# Size of the weights in bytes from which matrix products dominate a step, so that kernels justify their build time.
_LEAST_BYTES = 32 << 20
# Number of steps between checks of whether a build would save time or has finished.
_LOOK_EVERY = 32


class DecodeSwitch:
    """Runs decode steps, and changes to a faster implementation if the change saves time.

    Args:
        model: the policy that generates.
        cache: the policy's KV cache.
        layers: cache layout of each layer; empty if some layers are recurrent.
        mode: ``auto`` compiles the step in the background if compiling saves time. ``eager`` never compiles the step.
            ``compiled`` waits in :meth:`prepare` until the step is compiled.
        builds: whether mode ``auto`` may compile the step if no compiled step is on disk. If ``builds`` is false, mode
            ``auto`` uses a compiled step only if another process has written one to the disk.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: SlotCache,
        layers: tuple[LayerShape, ...],
        mode: DecodeMode,
        builds: bool = True,
    ) -> None:
        self._builds = builds
        self.model, self.cache, self.layers, self.mode = model, cache, layers, mode
        self.threads = ThreadRule(model)
        self.decoder: EagerDecode | StepDecode = EagerDecode(model, cache)
        self._undecided = mode == "auto"
        self._wants_kernels = (
            cache.records is None and bool(layers) and model.device.type == "cpu" and model.weight_bytes >= _LEAST_BYTES
        )
        self._saved = SAVED
        self._build: _Build | None = None
        self._spent_s, self._generated, self._steps = 0.0, 0, 0

    @property
    def compiled(self) -> bool:
        """Whether compiled steps are in use."""
        return isinstance(self.decoder, StepDecode) and isinstance(self.decoder.step, StepPackage)

    def prepare(self) -> None:
        """In mode ``compiled``, load the compiled decode step from disk. If the file does not exist, compile the step first.

        Raises:
            EngineError: the step cannot be compiled or loaded.
        """
        if self.mode == "compiled" and not self.compiled:
            try:
                if not self._spec.path().exists() and (failure := _Build(self._spec).wait()):
                    raise EngineError(failure)
                self._take_over()
            except (EngineError, OSError, RuntimeError) as error:
                raise EngineError(
                    f"the decode step cannot be compiled: {error}; use --decode auto (decode=auto) instead"
                ) from error

    def run(self, batch: DecodeBatch, remaining: Callable[[], int]) -> Draw:
        """Run one decode step.

        ``remaining()`` returns an upper bound on the total number of tokens that the current samples have left to generate.
        """
        self.threads.apply(batch.padded)
        if self._wants_kernels:
            self._take_kernels()
        if not self._undecided:
            return self.decoder.run(batch)
        if self._steps % _LOOK_EVERY == 0:
            self._look(remaining)
        self._steps += 1
        began = time.perf_counter()
        draw = self.decoder.run(batch)
        self._spent_s += time.perf_counter() - began
        self._generated += len(batch.tokens)
        return draw

    def refresh(self) -> None:
        """Update the addresses of the weights in a compiled step; see :meth:`StepPackage.refresh`."""
        if isinstance(self.decoder, StepDecode) and isinstance(self.decoder.step, StepPackage):
            self.decoder.step.refresh()

    def close(self) -> None:
        """Stop compiling, and release the weights of a compiled step. Afterwards, the compiled step cannot run."""
        self._end_build()
        if isinstance(self.decoder, StepDecode) and isinstance(self.decoder.step, StepPackage):
            self.decoder.step.close()

    def _end_build(self) -> None:
        if self._build is not None:
            self._build.stop()
            self._build = None

    @cached_property
    def _spec(self) -> StepSpec:
        """The spec of the step to compile.

        Raises:
            EngineError: the decode steps of this model cannot be compiled on this device.
        """
        model = self.model
        if model.device.type != "cpu":
            raise EngineError("compiled decode steps need a CPU, but the model is on another device")
        if not self.layers:
            raise EngineError(
                f"{type(model.module).__name__} has recurrent states, which compiled decode steps do not support"
            )
        if not type(model.module).__module__.startswith("transformers."):
            raise EngineError(
                "the model's code comes from the checkpoint, but only models from the transformers library can be compiled"
            )
        if model.adapter is not None and not model.adapter.merges:
            raise EngineError(
                "the adapter is not merged into the weights, but compiled decode steps need merged weights"
            )
        return StepSpec.of(model, self.layers)

    def _take_kernels(self) -> None:
        self._wants_kernels = False
        if problem := load_all(KERNELS):
            logger.info("decoding runs without areno's kernels: %s", compiler_missing() or problem)
            return
        use_row_products(self.model.module)
        if not self.compiled:
            self.decoder = StepDecode(DecodeStep(self.model, self.layers, kernels=True), self.cache)
            self._saved = SAVED_BESIDE_KERNELS

    def _look(self, remaining: Callable[[], int]) -> None:
        """Switch to the compiled step if the step is on disk. Otherwise, start to compile the step if compiling saves time."""
        try:
            if self._build is not None:
                self._look_at_build(self._build)
            elif self._spec.path().exists():
                self._take_over()
            elif self._builds and self._pays(remaining):
                if reason := compiler_missing():
                    raise EngineError(reason)
                logger.info("compiling the decode step in the background: %s", self._spec.path().name)
                self._build = _Build(self._spec)
        except (EngineError, OSError, RuntimeError) as error:  # such as a full disk, or a package that cannot be loaded
            self._end_build()
            self._undecided = False
            logger.info("decoding stays eager: %s", error)

    def _look_at_build(self, build: _Build) -> None:
        failure = build.outcome()
        if failure is None:
            return
        self._end_build()
        if failure:
            raise EngineError(failure)
        self._take_over()

    def _pays(self, remaining: Callable[[], int]) -> bool:
        """Return whether the expected savings exceed the compile time.

        ``remaining()`` returns an upper bound on the total number of tokens that the current samples have left to generate.
        This number does not include future requests. As a heuristic, the remaining decode time is therefore assumed to be at
        least as long as the decode time so far.
        """
        if not self._generated:
            return False
        ahead = remaining() * self._spent_s / self._generated
        return self._saved * max(ahead, self._spent_s) > BUILD_BASE_S + BUILD_LAYER_S * len(self.layers)

    def _take_over(self) -> None:
        began = time.perf_counter()
        package = StepPackage(self._spec.path(), self.model, self._spec)
        self.decoder, self._undecided = StepDecode(package, self.cache), False
        logger.info("switched to the compiled decode step (loaded in %.2f s)", time.perf_counter() - began)


class _Build:
    def __init__(self, spec: StepSpec) -> None:
        self._folder = ScratchFolder("build")
        described = Path(self._folder.name) / "spec.json"
        described.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        self._errors: IO[bytes] = open(Path(self._folder.name) / "errors", "w+b")  # noqa: SIM115
        command = [*python_command(), "-m", "areno.engine.rollout.compiled.build"]
        command += [str(described), str(spec.path()), str(os.getpid())]
        environment = {**os.environ, **search_path()}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors
        )
        # Kills the process if it still runs and removes its files, at the latest when the interpreter exits.
        self.stop = weakref.finalize(self, _end, self._process, self._errors, self._folder)

    def outcome(self) -> str | None:
        """Return None while the step is being compiled, then "" on success, or the error message on failure."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process that compiles the decode step exited with code {code}"

    def wait(self) -> str:
        self._process.wait()
        outcome = self.outcome()
        self.stop()
        assert outcome is not None
        return outcome


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], folder: ScratchFolder) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    errors.close()
    folder.cleanup()
