"""How fast new weights reach rollout replicas, and how long generation pauses for them.

    python benchmarks/weight_update.py                       # table, then one line of JSON
    python benchmarks/weight_update.py --save NAME           # also benchmarks/results/NAME.json

A trainer and ``--replicas`` replicas in their own processes; the replicas generate continuously. Per mode: MB/s from the call
to its return, the time that a replica's loop pauses (``pause_ms``), and the longest gap between two tokens of a sample during
an update and without one (``gap_ms``, ``usual_gap_ms``); the former includes recomputing the KV cache.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import finish, machine, make_checkpoint, median
from rollout import SMALL, TINY

SHAPES = {"tiny": TINY, "small": SMALL}
MODES = ("shm", "xccl", "disk")


class Gaps:
    """The longest time between two tokens of one sample.

    Args:
        engine: engine or fleet that generates.
        streams: number of samples that are generated at the same time.
    """

    def __init__(self, engine: Any, streams: int) -> None:
        self.engine, self.streams = engine, streams
        self._lock = threading.Lock()
        self._last: dict[int, float] = {}
        self._longest = 0.0
        self._stopped = False

    def start(self) -> None:
        for stream in range(self.streams):
            self._submit(stream)

    def stop(self) -> None:
        self._stopped = True

    def _submit(self, stream: int) -> None:
        from areno.types import Request, SamplingParams

        if self._stopped:
            return
        sampling = SamplingParams(max_new_tokens=1900, ignore_eos=True)
        request = Request([5, 6, 7, 8] * 8, sampling, [stream], listener=lambda _sample, _token: self._heard(stream))
        self.engine.submit([request])[0].add_done_callback(lambda _: self._submit(stream))

    def _heard(self, stream: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self._longest = max(self._longest, now - self._last.get(stream, now))
            self._last[stream] = now

    def settle(self) -> None:
        """Wait until every sample has one more token."""
        asked = time.perf_counter()
        while any(last < asked for last in list(self._last.values())):
            time.sleep(0.005)

    def take(self) -> float:
        """Longest gap since the last call, in ms."""
        with self._lock:
            longest, self._longest = self._longest, 0.0
        return 1000 * longest


def measure(path: str, replicas: int, updates: int) -> dict[str, Any]:
    import torch

    from areno.engine.engine import Engine
    from areno.engine.engine_config import EngineConfig
    from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet

    config = EngineConfig(kv_cache_tokens=32768, decode="eager")
    trainer = Engine(path, config)
    with tempfile.TemporaryDirectory() as logs:
        fleet = RolloutFleet(path, config, FleetOptions(replicas=replicas, log_folder=Path(logs), restart=False))
        torch.set_num_threads(fleet.threads)
        gaps = Gaps(fleet, 2 * replicas)
        gaps.start()
        time.sleep(2.0)
        found: dict[str, Any] = {"modes": {}}
        version = 0
        for mode in MODES:
            reports, longest, usual = [], [], []
            for _ in range(updates + 1):  # the first one creates shared memory, or joins the collective
                gaps.take()
                time.sleep(0.5)
                usual.append(gaps.take())
                version += 1
                reports.append(fleet.update_weights(trainer, version, mode))
                gaps.settle()
                longest.append(gaps.take())
            timed = reports[1:]
            found["modes"][mode] = {
                "mb_s": round(median([r.nbytes / r.seconds / 1e6 for r in timed])),
                "seconds": median([r.seconds for r in timed]),
                "first_s": round(reports[0].seconds, 4),
                "pause_ms": median([1000 * max(r.pauses_s.values()) for r in timed]),
                "gap_ms": round(median(longest[1:]), 1),
                "usual_gap_ms": round(median(usual[1:]), 1),
            }
        found["mb"] = round(reports[0].nbytes / 1e6, 1)
        gaps.stop()
        fleet.close()
    trainer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--updates", type=int, default=7, help="timed updates of each mode, after the first")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "weight_update", "machine": machine(), "settings": vars(args), "models": {}}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            make_checkpoint(path, **asdict(SHAPES[name]), dtype="float32")
            result["models"][name] = found = measure(str(path), args.replicas, args.updates)
        for mode, row in found["modes"].items():
            print(
                f"{name} ({found['mb']} MB) {mode}: {row['mb_s']} MB/s, pause {row['pause_ms']} ms, longest gap between "
                f"tokens {row['gap_ms']} ms (usually {row['usual_gap_ms']} ms)",
                flush=True,
            )
    finish(result, args.save)


if __name__ == "__main__":
    import areno  # before torch: areno sets how long idle threads spin

    assert areno.__version__
    main()
