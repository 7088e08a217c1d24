"""How the end of a process is recorded."""

from __future__ import annotations

import pytest

from areno.errors import UsageError
from areno.storage.run_dir import RunDirectory
from areno.storage.run_status import recorded_status


@pytest.mark.parametrize(
    ("error", "state", "detail"),
    [
        (SystemExit(), "finished", {}),
        (SystemExit(0), "finished", {}),
        (SystemExit(143), "stopped", {"signal": "SIGTERM"}),
        (SystemExit(200), "failed", {"error": "SystemExit: 200"}),
        (SystemExit(1), "failed", {"error": "SystemExit: 1"}),
        (SystemExit("no data"), "failed", {"error": "SystemExit: no data"}),
        (KeyboardInterrupt(), "stopped", {"signal": "SIGINT"}),
        (UsageError("--lr"), "failed", {"error": "UsageError: --lr"}),
    ],
)
def test_the_status_tells_an_exit_with_an_error_from_one_without(tmp_path, error, state, detail):
    run = RunDirectory(tmp_path)
    with pytest.raises(type(error)), recorded_status(run):
        raise error
    status = run.read_json(run.status_path)
    assert status["state"] == state
    assert {name: status[name] for name in ("signal", "error") if name in status} == detail
