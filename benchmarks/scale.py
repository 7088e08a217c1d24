"""What several workers cost: measured with 1, 2, 4 and 8 on this machine, and predicted for more.

    python benchmarks/scale.py                                   # workers of this machine
    RAY_ADDRESS=HOST:PORT python benchmarks/scale.py --launchers local ray
    python benchmarks/scale.py --names nfs etcd3 --etcd HOST:PORT --save NAME

For each number of workers: seconds until a group has started (with PyTorch loaded), milliseconds of a call to all workers,
and of adding and reading a name by all workers at once, and seconds of a weight update to that number of replicas.

``predicted`` applies a model to more GPUs than were measured, with a and b fitted by least squares:

    start(n) = a + b n          workers of one machine share its cores: with several machines, n is per machine
    call(n)  = a + b n          the calling process serializes and signs one message per worker
    names(n) = a + b n          one operation of each of n workers at the same time
    update(n, bytes) = ceil(log2(n + 1)) bytes / rate           gloo's tree; ``rate`` measured with one replica

So a prediction is about areno's own overhead, on similar cores, and says nothing about a slower network.
The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import finish, machine, make_checkpoint, median
from rollout import SMALL, TINY

SHAPES = {"tiny": TINY, "small": SMALL}
SIZES = (16, 64, 256, 1024)
GPUS_PER_REPLICA, GPUS_PER_MACHINE = 8, 8
NAMES_PER_WORKER = 50


class Worker:
    """A worker of a group: answers calls, and uses names."""

    def nothing(self) -> None:
        """Answer the call."""

    def use_names(self, options: Any, root: str) -> float:
        """Mean seconds of adding and reading a name."""
        from areno.name_resolve import Repository

        names = Repository(options.open())
        began = time.perf_counter()
        for _ in range(NAMES_PER_WORKER):
            name = names.add_subentry(root, "127.0.0.1:12345")
            names.get(name)
        return (time.perf_counter() - began) / NAMES_PER_WORKER


def make_worker(_send: Any) -> Worker:
    """Create the worker, in its process."""
    return Worker()


def launcher_of(kind: str, workers: int, folder: Path) -> Any:
    """The launcher; None for this machine only."""
    if kind == "local":
        return None
    from areno.launch.launcher import Names, RoleNeed
    from areno.launch.ray_cluster import RayLauncher
    from areno.name_resolve import NameOptions
    from areno.name_resolve.ray_store import connect

    connect("--launchers ray")
    names = Names(NameOptions("nfs", str(folder)), f"scale/{uuid.uuid4().hex}")
    return RayLauncher({"scale": RoleNeed(workers=workers)}, names)


def control(kind: str, workers: int, stores: dict[str, Any], folder: Path) -> dict[str, float]:
    """Times of one group: its start, calls and names."""
    from areno.engine.parallel.workers import Processes, WorkerGroup

    launcher = launcher_of(kind, workers, folder)
    processes = Processes(launcher=launcher, role="scale", threads=1)
    began = time.perf_counter()
    group = WorkerGroup([make_worker] * workers, processes=processes)
    found = {"start_s": time.perf_counter() - began}
    calls = []
    for _ in range(50):
        began = time.perf_counter()
        group.call("nothing")
        calls.append(time.perf_counter() - began)
    found["call_ms"] = round(1000 * statistics.median(calls), 3)
    for name, options in stores.items():
        root = f"scale/{uuid.uuid4().hex}"
        found[f"names_{name}_ms"] = round(1000 * statistics.median(group.call("use_names", options, root)), 3)
    group.close()
    if launcher is not None:
        launcher.close()
    return found


def update(path: str, replicas: int, updates: int) -> dict[str, float]:
    """Seconds and bytes of a broadcast to idle replicas."""
    from areno.engine.engine import Engine
    from areno.engine.engine_config import EngineConfig
    from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
    from areno.rollouts.fleet.weight_transfer import WeightOptions

    config = EngineConfig(kv_cache_tokens=4096, decode="eager")
    trainer = Engine(path, config)
    with tempfile.TemporaryDirectory() as logs:
        options = FleetOptions(replicas=replicas, log_folder=Path(logs), restart=False, threads=1)
        fleet = RolloutFleet(path, config, options, WeightOptions(mode="xccl"))
        reports = [fleet.update_weights(trainer, version) for version in range(1, updates + 2)][1:]
        fleet.close()
    trainer.close()
    return {"update_s": median([report.seconds for report in reports]), "bytes": reports[0].nbytes}


def line(points: dict[int, float]) -> tuple[float, float]:
    """a and b of a + b n by least squares; b is at least 0."""
    n, mean_n, mean_y = len(points), sum(points) / len(points), sum(points.values()) / len(points)
    spread = sum((x - mean_n) ** 2 for x in points)
    b = max(sum((x - mean_n) * (y - mean_y) for x, y in points.items()) / spread, 0.0) if n > 1 else 0.0
    return mean_y - b * mean_n, b


def predict(measured: dict[int, dict[str, float]], weight_gb: float) -> list[dict[str, float]]:
    """Apply the model of the module docstring to each number of GPUs, those of trainer and replicas together."""
    rows = []
    keys = [key for key in next(iter(measured.values())) if key not in ("bytes", "update_s")]
    lines = {key: line({n: row[key] for n, row in measured.items()}) for key in keys}
    alone = measured[min(measured)]
    rate = alone["bytes"] / alone["update_s"]
    for gpus in SIZES:
        replicas = gpus // GPUS_PER_REPLICA
        machines = math.ceil(gpus / GPUS_PER_MACHINE)
        row = {"gpus": gpus, "replicas": replicas}
        for key, (a, b) in lines.items():
            workers = gpus / machines if key == "start_s" else gpus
            row[key] = round(a + b * workers, 3)
        row["update_s"] = round(math.ceil(math.log2(replicas + 1)) * weight_gb * 1e9 / rate, 2)
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, float]]) -> None:
    """Print a table."""
    print(f"\n{title}")
    keys = list(rows[0])
    print("  ".join(f"{key:>14}" for key in keys))
    for row in rows:
        print("  ".join(f"{row[key]:>14.4g}" for key in keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--launchers", nargs="+", choices=["local", "ray"], default=["local"])
    parser.add_argument("--names", nargs="+", choices=["nfs", "etcd3", "ray"], default=["nfs"])
    parser.add_argument("--etcd", default="localhost:2379", help="address of an etcd server (default: %(default)s)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the model (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=3, help="weight updates, after one more (default: %(default)s)")
    parser.add_argument(
        "--weights", type=float, default=15.2, help="GB of the predicted model (default: 7.6 B in bf16)"
    )
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    from areno.name_resolve import NameOptions

    result: dict[str, Any] = {"benchmark": "scale", "machine": machine(), "launchers": {}, "weights_gb": args.weights}
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, NameOptions] = {}
        for name in args.names:
            stores[name] = NameOptions(name, str(Path(folder) / "names"), args.etcd)
        path = str(Path(folder) / "model")
        make_checkpoint(Path(path), **asdict(SHAPES[args.shape]))
        updates = {n: update(path, n, args.updates) for n in args.workers}
        for kind in args.launchers:
            measured = {n: {**control(kind, n, stores, Path(folder)), **updates[n]} for n in args.workers}
            show(f"{kind}, measured", [{"workers": n, **row} for n, row in measured.items()])
            predicted = predict(measured, args.weights)
            show(f"{kind}, predicted by the model of this file's text", predicted)
            result["launchers"][kind] = {"measured": measured, "predicted": predicted}
    finish(result, args.save)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
