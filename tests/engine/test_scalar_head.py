"""The scalar head of critics and reward models, read from files of several kinds and from a local stand-in for the hub."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areno.engine.model.value_model import read_head
from areno.errors import UsageError

WEIGHT, BIAS = torch.arange(8.0)[None], torch.tensor([0.5])
COMMIT = "0" * 40


def save_head(folder: Path, kind: str, prefix: str = "", **more: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{prefix}score.weight": WEIGHT, f"{prefix}score.bias": BIAS, "model.norm.weight": torch.ones(8)} | more
    if kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("kind", "prefix"), [("safetensors", ""), ("safetensors", "model."), ("bin", ""), ("bin", "model.")]
)
def test_a_head_is_read_from_both_kinds_of_files(kind, prefix, tmp_path):
    head = read_head(str(save_head(tmp_path / "model", kind, prefix, step=torch.zeros(1))))
    assert head is not None
    assert torch.equal(head[0], WEIGHT)
    assert head[1] is not None
    assert torch.equal(head[1], BIAS)


def test_other_files_and_names_are_no_head(tmp_path):
    save_file({"model.score_norm.weight": WEIGHT, "score": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert read_head(str(tmp_path)) is None


def test_a_head_of_another_rank_is_refused(tmp_path):
    save_file({"score.weight": torch.zeros(1, 2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"scalar head has the shape \(1, 2, 3\)"):
        read_head(str(tmp_path))


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder as the model ``some/model``, as the hub does."""

    folder: Path
    requested: list[str]

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def respond(self, with_body: bool) -> None:
        names = [path.name for path in sorted(self.folder.iterdir())]
        if self.path.startswith("/api/models/some/model/tree"):
            content = json.dumps([{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in names]).encode()
        elif self.path.startswith("/api/models/some/model"):
            files = [{"rfilename": name} for name in names]
            content = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": files}).encode()
        else:
            name = self.path.split("?")[0].rsplit("/", 1)[-1]
            content = (self.folder / name).read_bytes()
            self.requested.append(name)
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("kind", ["safetensors", pytest.param("bin", marks=pytest.mark.long)])
def test_the_head_of_a_model_on_the_hub_is_downloaded(kind, tmp_path):
    save_head(tmp_path / "served", kind)
    (tmp_path / "served" / "consolidated.safetensors").write_bytes(b"the same weights in another format")
    handler = type("Served", (Hub,), {"folder": tmp_path / "served", "requested": []})
    program = (
        "import sys; from areno.engine.model.value_model import read_head; print(read_head(sys.argv[1])[0].tolist())"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint}
        command = [sys.executable, "-c", program, "some/model"]
        result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert result.stdout.strip() == str(WEIGHT.tolist()), result.stderr
    assert {Path(name).stem for name in handler.requested} == {"model" if kind == "safetensors" else "pytorch_model"}
    offline = variables | {"HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=120)
    assert again.stdout == result.stdout, again.stderr
