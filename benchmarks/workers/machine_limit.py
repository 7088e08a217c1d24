"""What this machine allows, for ``real_model.py``: GEMM rate, and seconds of a decode step's products. Prints one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import limits

import areno  # before torch: areno sets how long idle threads spin


def main() -> None:
    settings = json.loads(sys.argv[1])
    import torch

    assert areno.__version__
    torch.set_num_threads(settings["threads"])
    shape = limits.Shape(**settings["shape"])
    result = {
        "gemm_gflops": limits.measure_gemm(shape, [settings["train_rows"]], "cpu", settings["dtype"]) / 1e9,
        "products_s": limits.measure_products(shape, settings["decode_rows"], settings["dtype"])
        if settings["decode_rows"]
        else None,
        "how": f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
