"""Greedy answers of llama.cpp to the chats of a file, with the template in the model's file. Prints one JSON line: the texts.

Settings: ``gguf``, ``data`` (JSONL with ``prompt``, a list of messages), ``threads``, ``max_tokens``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(sys.argv[1])
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf"]
    params.n_parallel, params.n_ctx = 1, 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.fit_params = False  # it would shrink the context
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def answer(line: str) -> str:
        body: dict[str, Any] = {"messages": json.loads(line)["prompt"], "max_tokens": settings["max_tokens"]}
        found = server.handle_chat_completions(body | {"temperature": 0.0})
        found = json.loads(found) if isinstance(found, str) else found
        assert "choices" in found, f"no answer: {found}"
        return str(found["choices"][0]["message"]["content"])

    lines = Path(settings["data"]).read_text(encoding="utf-8").splitlines()
    print(json.dumps([answer(line) for line in lines]), flush=True)


if __name__ == "__main__":
    main()
