"""Replicas that join and leave while others generate."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areno.cli.main import main
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet import control
from areno.rollouts.fleet import fleet as fleet_module
from areno.rollouts.fleet.replica_supervisor import WorkerCreationError
from areno.rollouts.fleet.weight_transfer import WeightOptions
from areno.rollouts.servers.command_line import ServerOptions
from tests.experiments.fleet.conftest import config
from tests.experiments.fleet.support import answers, learn, parameters_of, requests, same, wait_until
from tests.support.examples import some_quick


def unfinished(fleet):
    return [replica.unfinished for replica in fleet.health().replicas]


@pytest.mark.parametrize("mode", some_quick(["shm", "xccl", "disk"], "shm"))
def test_a_joining_replica_gets_the_newest_weights_and_a_leaving_one_finishes_its_requests(trainer, open_fleet, mode):
    fleet = open_fleet(weights=WeightOptions(mode=mode))
    learn(trainer)
    fleet.update_weights(trainer, 1)
    fleet.resize(2)
    assert all(same(group.run_on_all_ranks(parameters_of)[0], parameters_of(trainer)) for group in fleet._up().values())

    wanted = requests(6, tokens=300)
    futures = fleet.submit(wanted)
    wait_until(lambda: unfinished(fleet) == [3, 3])
    fleet.resize(1)
    assert len(fleet.health().replicas) == 1
    found = [future.result(60).sequences[0] for future in futures]
    assert [sequence.resp_tokens for sequence in found] == answers(trainer, wanted)
    assert {version for sequence in found for version in sequence.versions} == {1}
    assert fleet.health().resubmitted == 0

    learn(trainer, seed=2)
    assert set(fleet.update_weights(trainer, 2, verify=True).pauses_s) == {0}
    fleet.resize(2)  # under the number of a replica that has left
    assert set(fleet.update_weights(trainer, 3, verify=True).pauses_s) == {0, 1}
    assert answers(fleet, requests(4)) == answers(trainer, requests(4))


def test_a_replica_that_cannot_join_changes_nothing(policy, tmp_path, open_fleet):
    copy = shutil.copytree(policy, tmp_path / "copy")
    fleet = open_fleet(path=copy)
    expected = answers(fleet, requests(2))
    shutil.rmtree(copy)
    with pytest.raises((WorkerCreationError, UsageError), match="copy"):
        fleet.resize(3)
    assert [worker.worker.state for worker in fleet.health().replicas] == ["ready"]
    assert answers(fleet, requests(2)) == expected


def test_each_replica_gets_its_own_gpus(monkeypatch, tmp_path, open_fleet):
    """A simulated number of GPUs; the servers are shells that write which GPUs they may use."""
    monkeypatch.setattr(fleet_module, "visible_gpus", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    shell = ("sh", "-c", f"echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/gpus; exit 1")
    options = {"tp_size": 2, "server": ServerOptions(product="sglang", command=shell, gpu=True), "restart": False}
    with pytest.raises(WorkerCreationError, match="exited during startup"):
        open_fleet(config(device=torch.device("cuda")), replicas=2, **options)
    assert sorted((tmp_path / "gpus").read_text().split()) == ["3,4", "5,6"]
    with pytest.raises(UsageError, match="cannot be 3, because this machine has devices for only 2 replicas"):
        open_fleet(config(device=torch.device("cuda")), replicas=3, **options)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, "3 0 passive"),
        ({"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "7"}, "3 7 unset"),
        ({"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}, "3 1000000 active"),
    ],
)
def test_replicas_keep_the_users_openmp_variables(variables, expected, monkeypatch, tmp_path, open_fleet):
    """The server is a shell that writes its variables; areno has set the default spin count of this process."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    for name, value in ({"GOMP_SPINCOUNT": "1000000"} | variables).items():
        monkeypatch.setenv(name, value)
    script = f'echo "$OMP_NUM_THREADS $GOMP_SPINCOUNT ${{OMP_WAIT_POLICY-unset}}" > {tmp_path}/variables; exit 1'
    server = ServerOptions(product="vllm", command=("sh", "-c", script), gpu=False)
    with pytest.raises(WorkerCreationError, match="exited during startup"):
        open_fleet(server=server, restart=False)
    assert (tmp_path / "variables").read_text().strip() == expected


def test_closing_does_not_wait_for_a_leaving_replica(open_fleet):
    fleet = open_fleet(replicas=2)
    futures = fleet.submit(requests(2, tokens=8000))
    wait_until(lambda: unfinished(fleet) == [1, 1])
    leaving = threading.Thread(target=fleet.resize, args=[1], daemon=True)
    leaving.start()
    fleet.close()
    leaving.join(30)
    assert not leaving.is_alive()
    assert all(future.done() for future in futures)


def test_the_command_resizes_a_running_fleet(open_fleet, tmp_path, capsys):
    folder = tmp_path / "logs"
    fleet = open_fleet(scales=True)
    assert main(["scale", str(folder)]) == 0
    assert main(["scale", str(folder), "2"]) == 0
    assert fleet.size() == 2
    assert main(["scale", str(folder), "1"]) == 0
    assert fleet.size() == 1
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if line.startswith("replicas")] == ["replicas: 1", "replicas: 2", "replicas: 1"]
    assert main(["scale", str(folder), "--add", "http://127.0.0.1:1"]) == 1
    assert (
        "--add works only for a run that uses existing inference servers, but this run starts"
        in capsys.readouterr().err
    )
    assert main(["scale", str(folder), "0"]) == 2
    fleet.close()
    assert main(["scale", str(folder)]) == 2
    assert "has no rollout replicas" in capsys.readouterr().err
    assert not list(folder.glob("replicas*"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
def test_only_the_user_of_a_run_can_scale_it(open_fleet, tmp_path, capsys, caplog):
    folder = tmp_path / "logs"
    fleet = open_fleet(scales=True)
    os.chown(folder / "replicas.json", 12345, -1)
    assert main(["scale", str(folder), "2"]) == 2
    assert (
        "belongs to the user with id 12345, but your id is 0; run `areno scale` as the owner" in capsys.readouterr().err
    )

    request = tmp_path / "request"
    request.write_text(json.dumps({"id": "x", "replicas": 2, "addresses": []}))
    os.chown(request, 12345, -1)
    os.replace(request, folder / "replicas.wanted.json")
    wait_until(lambda: not (folder / "replicas.wanted.json").exists())
    time.sleep(1.2)  # two more looks at the folder
    assert [record.message.endswith("because the file belonged to another user") for record in caplog.records] == [True]
    assert fleet.size() == 1


def test_a_request_that_the_run_has_not_begun_is_withdrawn(open_fleet, tmp_path):
    folder = tmp_path / "logs"
    fleet = open_fleet(scales=True)
    with fleet._updating:  # a new replica waits for the end of a weight update
        first = threading.Thread(target=control.request, args=[folder, 2, [], 60, print])
        first.start()
        wait_until(lambda: json.loads((folder / "replicas.json").read_text())["begun"])
        with pytest.raises(EngineError, match=r"did not begin to resize within 0\.1 s, so the request was withdrawn"):
            control.request(folder, 3, [], 0.1, print)
    first.join(60)
    assert fleet.size() == 2
    assert not (folder / "replicas.wanted.json").exists()


class Sizes:
    """Stands in for a fleet, whose replicas play no role here."""

    def __init__(self):
        self.replicas = 1

    def resize(self, replicas, addresses=()):
        self.replicas = replicas

    def size(self):
        return self.replicas


def test_each_of_several_requests_at_once_is_handled(tmp_path):
    handler = control.ReplicaControl(Sizes(), tmp_path)
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(control.request, tmp_path, size, [], 60, print) for size in (2, 3, 4, 5)]
            assert all(future.result(60) in (2, 3, 4, 5) for future in asked)
    finally:
        handler.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", "7"])
def test_an_invalid_request_is_ignored(text, tmp_path, caplog):
    handler = control.ReplicaControl(Sizes(), tmp_path)
    try:
        (tmp_path / "replicas.wanted.json").write_text(text)
        wait_until(lambda: not (tmp_path / "replicas.wanted.json").exists(), 10)
        wait_until(lambda: "ignoring an invalid request" in caplog.text, 10)
        assert control.request(tmp_path, 3, [], 30, print) == 3
    finally:
        handler.close()


def test_scaling_a_killed_run_times_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "replicas.json").write_text(json.dumps({"replicas": 2}))
    monkeypatch.setattr(control, "_ANSWER_S", 1.0)
    assert main(["scale", str(tmp_path)]) == 1
    assert "did not respond within 1 s; check that it is still running" in capsys.readouterr().err
    with pytest.raises(EngineError, match="did not respond within 1 s"):
        control.request(tmp_path, 3, [], 60, print)
    assert [path.name for path in tmp_path.iterdir()] == ["replicas.json"]
