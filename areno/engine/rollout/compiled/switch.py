"""When the compiled decode step takes over: at once where it is on disk, else when the work pays for building it.

Building costs about 40 seconds of one core and never delays a token: it runs in a process of its own, at the lowest
priority, and the switch happens between two steps. A step that cannot be compiled is reported once, and decoding stays as
it is. Every step that was built is kept on disk, so the next run of the same model begins with it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Literal

from areno.cache_folder import ScratchFolder
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.compiled.package import StepPackage
from areno.engine.rollout.compiled.spec import LayerShape, StepSpec
from areno.engine.rollout.decode import CompiledDecode, DecodeBatch, Decoder, EagerDecode
from areno.engine.rollout.kv_cache import SlotCache
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.threads import ThreadRule
from areno.errors import EngineError

logger = logging.getLogger("areno.engine.inference")

DecodeMode = Literal["auto", "eager", "compiled"]

# Measured on two cores: 42 s for 4 layers, 50 s for 8; a compiled step takes 0.25 to 0.9 of the time of an eager one.
BUILD_BASE_S, BUILD_LAYER_S = 34.0, 2.0
SAVED = 0.5
# Steps between two looks at whether it pays, or whether it is done.
_LOOK_EVERY = 32


class DecodeSwitch:
    """Runs decode steps, and changes how when that pays.

    Args:
        model: the policy.
        cache: its KV cache.
        layers: what each layer caches; empty where some layers keep another state.
        mode: ``eager`` never compiles; ``compiled`` waits for the build in :meth:`prepare`.
        builds: with ``auto``, build the step where it is missing; else only take it once another process has.
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
        self.decoder: Decoder = EagerDecode(model, cache, self.threads)
        self._undecided = mode == "auto"
        self._spec: StepSpec | None = None
        self._build: _Build | None = None
        self._spent_s, self._generated, self._steps = 0.0, 0, 0

    @property
    def compiled(self) -> bool:
        """Whether steps run as compiled code."""
        return isinstance(self.decoder, CompiledDecode)

    def prepare(self) -> None:
        """With ``compiled``, build or load the step now.

        Raises:
            EngineError: it cannot be compiled; the message says why.
        """
        if self.mode == "compiled" and not self.compiled:
            spec = self._named()
            if not spec.path().exists():
                failure = _Build(spec).wait()
                if failure:
                    raise EngineError(f"the decode step cannot be compiled: {failure}")
            self._take_over(spec)

    def run(self, batch: DecodeBatch, remaining: Callable[[], int]) -> Draw:
        """One step.

        Args:
            batch: what to decode.
            remaining: tokens that the queue may still ask for; called now and then.
        """
        if self._undecided:
            if self._steps % _LOOK_EVERY == 0:
                self._look(remaining)
            self._steps += 1
            began = time.perf_counter()
            draw = self.decoder.run(batch)
            self._spent_s += time.perf_counter() - began
            self._generated += len(batch.tokens)
            return draw
        return self.decoder.run(batch)

    def refresh(self) -> None:
        """To be called before the first step after the weights may have changed places."""
        if isinstance(self.decoder, CompiledDecode):
            self.decoder.package.refresh()

    def close(self) -> None:
        """End a build that is still running."""
        if self._build is not None:
            self._build.stop()
            self._build = None

    def _named(self) -> StepSpec:
        if self._spec is None:
            reason = self._obstacle()
            if reason:
                raise EngineError(reason)
            self._spec = StepSpec.of(self.model, self.layers)
        return self._spec

    def _obstacle(self) -> str:
        """Why this step cannot be compiled here, as far as that is known without trying."""
        if self.model.device.type != "cpu":
            return "it runs on an accelerator"
        if not self.layers:
            return f"{type(self.model.module).__name__} keeps states beside keys and values"
        if not type(self.model.module).__module__.startswith("transformers."):
            return "the checkpoint ships code of its own"
        if self.model.adapter is not None and not self.model.adapter.merges:
            return "the adapter runs beside the weights"
        return ""

    def _look(self, remaining: Callable[[], int]) -> None:
        try:
            spec = self._named()
            if self._build is not None:
                self._look_at_build(spec)
            elif spec.path().exists():
                self._take_over(spec)
            elif self._builds and self._pays(remaining):
                self._begin(spec)
        except EngineError as error:
            self._stay_eager(str(error))

    def _pays(self, remaining: Callable[[], int]) -> bool:
        """Whether what is queued, or as much as has been decoded so far, saves more than building costs."""
        if not self._generated:
            return False
        ahead = remaining() * self._spent_s / self._generated
        return SAVED * max(ahead, self._spent_s) > BUILD_BASE_S + BUILD_LAYER_S * len(self.layers)

    def _begin(self, spec: StepSpec) -> None:
        reason = _compiler_missing()
        if reason:
            raise EngineError(reason)
        logger.info("compiling the decode step beside the run, for %s", spec.path().name)
        self._build = _Build(spec)

    def _look_at_build(self, spec: StepSpec) -> None:
        assert self._build is not None
        failure = self._build.outcome()
        if failure is None:
            return
        self.close()
        if failure:
            raise EngineError(failure)
        self._take_over(spec)

    def _take_over(self, spec: StepSpec) -> None:
        began = time.perf_counter()
        package = StepPackage(spec.path(), self.model, spec)
        self.decoder, self._undecided = CompiledDecode(package, self.cache, self.threads), False
        logger.info("the decode step is compiled from here on (loaded in %.2f s)", time.perf_counter() - began)

    def _stay_eager(self, reason: str) -> None:
        self.close()
        self._undecided = False
        logger.info("decoding stays eager: %s", reason)


class _Build:
    """The building process.

    Args:
        spec: what to build.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._folder = ScratchFolder("build")
        described = Path(self._folder.name) / "spec.json"
        described.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        self._errors: IO[bytes] = open(Path(self._folder.name) / "errors", "w+b")  # noqa: SIM115
        command = [sys.executable, "-m", "areno.engine.rollout.compiled.build"]
        command += [str(described), str(spec.path()), str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors
        )
        atexit.register(_stop_at_exit, weakref.ref(self))

    def outcome(self) -> str | None:
        """None while it runs, "" when the package is there, else the reason why not."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the building process ended with status {code}"

    def wait(self) -> str:
        """Wait for the outcome."""
        self._process.wait()
        outcome = self.outcome()
        self.stop()
        assert outcome is not None
        return outcome

    def stop(self) -> None:
        """End the process if it runs, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        self._folder.cleanup()


def _stop_at_exit(build: weakref.ref[_Build]) -> None:
    left = build()
    if left is not None:
        left.stop()


def _compiler_missing() -> str:
    """Why nothing can be compiled on this machine; "" if it can."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return ""
    return f"there is no C++ compiler {compiler!r} here; install g++, or set CXX, for faster decoding"
