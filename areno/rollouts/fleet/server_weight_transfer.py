"""Transfers new weights from a trainer to inference servers, by a broadcast or through a folder (on disk or in shared memory).

A transfer is verified by comparing the server's log-probs of test tokens with the trainer's. A "success" response or changed
output would not prove that the weights are right.
"""

import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areno.cache_folder import ScratchFolder
from areno.engine.backend import ACTOR, Backend
from areno.errors import EngineError
from areno.rollouts.fleet.weight_transfer import TORN, Mode, UpdateReport, WeightOptions, save_weights
from areno.rollouts.servers.channel import ServerChannel
from areno.rollouts.servers.command_line import ServerOptions
from areno.rollouts.servers.replica import ServerReplica

logger = logging.getLogger(__name__)

_MEMORY = Path("/dev/shm")
_PROBE_TOKENS = 32
# Maximum mean difference of log-probs in nats. The key tells whether the server computes in fp32.
_MAX_GAP = {True: 0.01, False: 0.3}


class ServerWeightTransfer:
    """Transfers weights to servers, one update at a time. Servers that start later get the newest weights.

    In mode ``xccl``, ``channel`` broadcasts the weights to the servers where possible. A server that gets no broadcast loads
    the weights from a folder.
    """

    def __init__(
        self, options: WeightOptions, server: ServerOptions, vocab_size: int, channel: ServerChannel | None = None
    ) -> None:
        self.options, self.server = options, server
        self.newest: tuple[Path, int] | None = None
        self._channel, self._broadcast, self._torn = channel, False, False
        self._probe = [(7 * index + 3) % vocab_size for index in range(_PROBE_TOKENS)]
        self._max_gap = _MAX_GAP[any(word.endswith("float32") for word in server.arguments)]
        self._scratch: dict[Path | None, ScratchFolder] = {}
        self._checked = False

    def deliver(
        self, engine: Backend, replicas: Mapping[int, Any], version: int, mode: Mode, verify: bool
    ) -> UpdateReport:
        """Transfer the trainer's weights to all servers. The first transfer is verified. With ``verify``, every transfer is
        verified.

        Raises:
            EngineError: the trainer failed, or a server's log-probs differ too much from the trainer's.
        """
        began = time.perf_counter()
        previous, self.newest, self._torn = self.newest, None, True
        channel = self._channel if mode == "xccl" and self._channel is not None and self._channel.fits(engine) else None
        pauses = channel.send(engine, replicas, version) if channel is not None else {}
        left = {n: replica for n, replica in replicas.items() if n not in pauses and not replica.workers.failed}
        self._broadcast = channel is not None and not left
        size = sum(spec.nbytes for spec in channel.specs) if channel is not None else 0
        if not self._broadcast:
            self._checked = self._checked and channel is None
            folder = save_weights(engine, self._root(engine, mode), version)
            self.newest = (folder, version)
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            pauses |= self._load(left, folder, version)
        self._torn = False
        gap = None
        if verify or not self._checked:
            gap = self._gap(engine, {n: replicas[n] for n in pauses}, version)
        if previous is not None and (self.newest is None or previous[0] != self.newest[0]):
            shutil.rmtree(previous[0], ignore_errors=True)
        return UpdateReport(version, mode, size, time.perf_counter() - began, pauses, gap)

    def catch_up(self, replica: ServerReplica) -> float:
        """Transfer the newest weights to a server, and return the duration in seconds. Raises EngineError on failure."""
        if self._torn:
            raise EngineError(TORN)
        if self._broadcast and self._channel is not None:
            return self._channel.catch_up(replica)
        return replica.take_over(*self.newest, self.server.adapter) if self.newest is not None else 0.0

    def _load(self, replicas: Mapping[int, Any], folder: Path, version: int) -> dict[int, float]:
        with ThreadPoolExecutor(max(len(replicas), 1), thread_name_prefix="areno-update") as pool:
            asked = {n: pool.submit(one.take_over, folder, version, self.server.adapter) for n, one in replicas.items()}
        for number, answer in asked.items():
            if (error := answer.exception()) is not None and not replicas[number].workers.failed:
                replicas[number].workers.abandon(f"its weights could not be updated: {error}")
        return {n: answer.result() for n, answer in asked.items() if answer.exception() is None}

    def _gap(self, engine: Backend, replicas: Mapping[int, ServerReplica], version: int) -> float | None:
        """Compute the mean absolute difference between each server's log-probs of test tokens and the trainer's, in nats.

        Return the largest result of all running servers; None if no server is running. Raises EngineError if the largest
        result exceeds a limit.
        """
        probes = {}
        for number, replica in replicas.items():
            try:
                probes[number] = replica.probe(self._probe, version)
            except EngineError:
                if not replica.workers.failed:
                    raise
        if not probes:
            return None
        expected = engine.score_logprobs(ACTOR, [tokens for tokens, _ in probes.values()])
        gaps = {
            number: _mean_difference(scores[-len(logprobs) :], logprobs)
            for (number, (_, logprobs)), scores in zip(probes.items(), expected, strict=True)
        }
        worst = max(gaps, key=gaps.__getitem__)
        if not gaps[worst] <= self._max_gap:
            raise EngineError(
                f"replica {worst} does not have the weights of version {version}: its log-probs on a test prompt differ "
                f"from the trainer's by {gaps[worst]:.3g} nats on average (limit: {self._max_gap:g}); check that server and "
                "trainer use the same model and dtype, and read the server's log"
            )
        logger.info(
            "weights of version %d arrived: log-probs differ by %.2g nats on average from the trainer's",
            version,
            gaps[worst],
        )
        self._checked = True
        return gaps[worst]

    def close(self) -> None:
        """Delete weight folders, and leave the broadcast group."""
        if self._channel is not None:
            self._channel.leave()
        if self.newest is not None:
            shutil.rmtree(self.newest[0], ignore_errors=True)
        for folder in self._scratch.values():
            folder.cleanup()

    def _root(self, engine: Backend, mode: Mode) -> Path:
        if self.options.folder is not None:
            return self.options.folder
        # Two versions exist at the same time; a checkpoint with optimizer state is an upper bound for both.
        fits = mode != "disk" and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > engine.checkpoint_bytes()
        root = _MEMORY if fits else None
        if root not in self._scratch:
            self._scratch[root] = ScratchFolder("weights", root)
        return Path(self._scratch[root].name)


def _mean_difference(expected: list[float], actual: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(expected, actual, strict=True)) / len(expected)
