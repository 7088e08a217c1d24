"""One process of ``first_token.py``: imports, loads, generates. Prints one JSON line."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    began = time.perf_counter()
    import areno.engine.engine as engines
    from areno.types import Request, SamplingParams

    imported = time.perf_counter()
    engine = engines.Engine(settings["model"], engines.EngineConfig(trains="nothing", decode=settings["decode"]))
    ready = time.perf_counter()
    request = Request(list(range(5, 21)), SamplingParams(max_new_tokens=1, ignore_eos=True), [1])
    engine.submit([request])[0].result()
    first = time.perf_counter()
    more = Request(list(range(5, 21)), SamplingParams(max_new_tokens=64, ignore_eos=True), [1])
    while settings["decode"] != "eager" and not engine.loop.decode.compiled:
        engine.submit([more])[0].result()
    switched = time.perf_counter()
    engine.close()
    figures = {"imports_s": imported - began, "ready_s": ready - imported, "first_token_s": first - imported}
    print(json.dumps({**figures, "switch_s": switched - first}))


if __name__ == "__main__":
    main()
