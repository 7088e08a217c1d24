"""One contract for all name repositories, and what only some of them guarantee.

etcd is a real server, if the machine has one (Debian's etcd-server); Ray is a real cluster of one node.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import uuid

import pytest

from areno import name_resolve
from areno.errors import ArenoError, UsageError
from areno.name_resolve import NameEntryExists, NameEntryNotFound, NameOptions, Repository
from areno.name_resolve.stores import FileStore
from tests.launch.services import end, free_port, own_folder, ray_head, wait_for

# Minimum time to live in seconds, to which etcd raises shorter ones; see its module.
SHORTEST_TTL = {"etcd3": 2.0}


RAY = (pytest.mark.long, pytest.mark.xdist_group("ray"))


@pytest.fixture(params=["memory", "nfs", "etcd3", pytest.param("ray", marks=RAY)])
def names(request, tmp_path):
    options = NameOptions(request.param, str(tmp_path / "names"))
    if request.param == "etcd3":
        options = NameOptions("etcd3", etcd3_addr=request.getfixturevalue("etcd_server").address)
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        options = NameOptions("ray", ray_actor_name=f"names-{uuid.uuid4().hex}")
    repository = Repository(options.open())
    repository.shortest_ttl = SHORTEST_TTL.get(request.param, 0.4)
    repository.options = options
    yield repository
    repository.reset()
    for name in ("u", "a", "late", "other", "stays", "short", "leader"):
        repository.clear_subtree(name)


def test_a_name_has_one_value_until_it_is_deleted(names):
    names.add("u/e/t/key", "one")
    assert names.get("/u/e/t/key/") == "one"
    with pytest.raises(NameEntryExists, match="u/e/t/key already has a value"):
        names.add("u/e/t/key", "two")
    assert names.get("u/e/t/key") == "one"
    names.add("u/e/t/key", "two\nlines, äöü", replace=True)
    assert names.get("u/e/t/key") == "two\nlines, äöü"
    names.delete("u/e/t/key")
    for missing in (lambda: names.get("u/e/t/key"), lambda: names.delete("u/e/t/key"), lambda: names.get("u/e")):
        with pytest.raises(NameEntryNotFound):
            missing()
    names.add("u/e/t/key", "again")
    assert names.get("u/e/t/key") == "again"
    for wrong in ("", "/", "a//b", "a/../b", "."):
        with pytest.raises(UsageError, match="is not a valid name"):
            names.add(wrong, "x")


def test_subtrees_match_whole_path_components(names):
    names.add("a/b", "root")
    names.add("a/b/c", "1")
    names.add("a/b/d/e", "2")
    names.add("a/bc", "other")
    assert names.find_subtree("a/b") == ["a/b", "a/b/c", "a/b/d/e"]
    assert names.get_subtree("a/b") == ["root", "1", "2"]
    entries = {names.add_subentry("a/b/servers", str(i)) for i in range(3)}
    assert set(names.find_subtree("a/b/servers")) == entries
    assert len(entries) == 3
    assert sorted(names.get_subtree("a/b/servers")) == ["0", "1", "2"]
    names.clear_subtree("a/b")
    assert names.find_subtree("a") == ["a/bc"]
    assert names.get_subtree("nothing/here") == []
    names.clear_subtree("nothing/here")


def test_waiting_and_watching(names):
    with pytest.raises(TimeoutError, match=r"late has no value after 0\.2 s"):
        names.wait("late", timeout=0.2, poll_frequency=0.02)
    threading.Timer(0.2, lambda: names.add("late", "here")).start()
    assert names.wait("late", timeout=10, poll_frequency=0.02) == "here"

    gone = threading.Event()
    names.add("other", "x")
    names.watch_names(["late", "other"], gone.set, poll_frequency=0.02)
    assert not gone.wait(0.2)
    names.delete("other")
    assert gone.wait(10)
    never = threading.Event()
    names.watch_names("never", never.set, poll_frequency=0.02, wait_timeout=0.1)
    assert never.wait(10)


def test_a_living_owner_keeps_values_alive_and_reset_removes_its_own(names):
    ttl = names.shortest_ttl
    names.add("kept", "x", keepalive_ttl=ttl)
    names.add("stays", "y", delete_on_exit=False)
    time.sleep(3 * ttl)
    assert names.get("kept") == "x"
    names.add("short", "z", delete_on_exit=False, keepalive_ttl=ttl)
    names.reset()
    with pytest.raises(NameEntryNotFound):
        names.get("kept")
    assert names.get("stays") == "y"
    time.sleep(1.7 * ttl)
    with pytest.raises(NameEntryNotFound):  # nobody keeps it alive any more
        names.get("short")
    assert names.find_subtree("short") == []
    names.add("short", "new")
    assert names.get("short") == "new"
    with pytest.raises(UsageError, match="keepalive_ttl=0"):
        names.add("bad", "x", keepalive_ttl=0)


def test_a_value_that_another_process_has_set_is_neither_kept_alive_nor_deleted(names):
    """Two repositories with separate stores are as separate as two processes."""
    if names.options.type == "memory":
        pytest.skip("a store in memory has only one process")
    ttl = names.shortest_ttl
    names.add("leader", "first", keepalive_ttl=ttl)
    names.add("other", "first")
    store = names.options.open()  # without a repository, nobody keeps its values alive
    assert store.write("leader", "second", ttl, replace=True)
    assert store.write("other", "second", None, replace=True)
    assert names.get("leader") == "second"
    time.sleep(2.5 * ttl)
    with pytest.raises(NameEntryNotFound):
        names.get("leader")
    names.reset()
    assert names.get("other") == "second"


def test_only_one_of_several_concurrent_adds_succeeds(names):
    won, start = [], threading.Barrier(8)

    def claim(i):
        start.wait()
        try:
            names.add("leader", str(i))
            won.append(str(i))
        except NameEntryExists:
            pass

    threads = [threading.Thread(target=claim, args=[i]) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [names.get("leader")] == won


class _SlowStore(FileStore):
    """Waits after it has read a file, as on a slow file server."""

    def _value(self, file):
        value = super()._value(file)
        time.sleep(random.random() * 0.02)
        return value


def _claim(root, rounds, barrier, won):
    """Add to each of several names whose values have expired, at the same time as other processes."""
    store, claimed = _SlowStore(root), []
    for number in range(rounds):
        barrier.wait()
        if store.write(f"expired/{number}", str(os.getpid()), None, replace=False):
            claimed.append((number, str(os.getpid())))
    won.put(claimed)


def test_only_one_of_several_processes_takes_over_an_expired_name(tmp_path):
    store, rounds, count = FileStore(tmp_path), 20, 4
    for number in range(rounds):
        store.write(f"expired/{number}", "old", 0.0, replace=False)
    processes = multiprocessing.get_context("spawn")
    barrier, won = processes.Barrier(count), processes.Queue()
    started = [processes.Process(target=_claim, args=(tmp_path, rounds, barrier, won)) for _ in range(count)]
    for process in started:
        process.start()
    claimed = sorted(pair for _ in started for pair in won.get(timeout=120))
    for process in started:
        process.join()
    assert claimed == [(number, store.read(f"expired/{number}")) for number in range(rounds)]


def test_the_module_has_one_repository_that_can_be_replaced(tmp_path):
    try:
        files = NameOptions("nfs", str(tmp_path))
        name_resolve.reconfigure(files)
        name_resolve.add("a/b", "1")
        assert Repository(files.open()).get("a/b") == "1"  # as another process sees it
        assert name_resolve.add_subentry("a", "2") in name_resolve.find_subtree("a")
        assert name_resolve.wait("a/b") == "1"
        assert sorted(name_resolve.get_subtree("a")) == ["1", "2"]
        name_resolve.clear_subtree("a")
        name_resolve.add("c", "3")
        name_resolve.reconfigure(NameOptions("memory"))
        assert Repository(files.open()).find_subtree("c") == []
        assert name_resolve.find_subtree("c") == []
        with pytest.raises(UsageError, match="use memory, nfs, etcd3 or ray"):
            name_resolve.reconfigure(NameOptions("redis"))
        with pytest.raises(UsageError, match="nfs_record_root"):
            name_resolve.reconfigure(NameOptions("nfs"))
    finally:
        name_resolve.reconfigure(NameOptions("memory"))


def test_files_of_a_killed_owner_expire(tmp_path):
    program = (
        "import sys, time\n"
        "from areno.name_resolve import NameOptions, Repository\n"
        "names = Repository(NameOptions('nfs', sys.argv[1]).open())\n"
        "names.add('owner', 'x', keepalive_ttl=1.0)\n"
        "names.add('forever', 'y')\n"
        "print('added', flush=True)\n"
        "time.sleep(60)\n"
    )
    names = Repository(NameOptions("nfs", str(tmp_path)).open())
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "added\n"
        time.sleep(1.5)
        assert names.get("owner") == "x"
        gone = threading.Event()
        names.watch_names("owner", gone.set, poll_frequency=0.05)
        owner.kill()
    assert gone.wait(5)
    assert names.find_subtree("owner") == []
    assert names.get("forever") == "y"


def test_names_survive_a_file_server_that_is_away_for_a_moment(tmp_path, caplog):
    """A symbolic link to itself stands in for the unreachable server: each access is an OSError."""
    root, away, gone, unborn = tmp_path / "names", tmp_path / "away", threading.Event(), threading.Event()
    names = Repository(NameOptions("nfs", str(root)).open())
    names.add("kept", "x", keepalive_ttl=3.0)
    names.watch_names("kept", gone.set, poll_frequency=0.05)
    names.watch_names("unborn", unborn.set, poll_frequency=0.05, wait_timeout=4.0)
    time.sleep(0.2)
    root.rename(away)
    root.symlink_to(root)
    time.sleep(1.5)  # longer than the interval of renewals
    assert not unborn.is_set()
    root.unlink()
    away.rename(root)
    assert not gone.wait(1.5)
    assert names.get("kept") == "x"
    assert {"cannot renew the time to live of the name kept", "cannot read the names kept"} <= {
        record.getMessage().partition(":")[0] for record in caplog.records
    }
    names.delete("kept")
    assert gone.wait(10)
    assert unborn.wait(10)


def test_the_clock_of_a_file_server_may_be_wrong(tmp_path, monkeypatch):
    """The server of a folder is an hour behind: the age of values is measured on its clock."""
    store = NameOptions("nfs", str(tmp_path)).open()
    monkeypatch.setattr(time, "time", lambda real=time.time: real() + 3600)
    assert store.write("a", "1", 5.0, replace=False)
    assert store.read("a") == "1"


def test_names_survive_an_etcd_restart_and_an_expired_lease(etcd_server):
    names = Repository(NameOptions("etcd3", etcd3_addr=etcd_server.address).open())
    names.add("run/worker", "here", keepalive_ttl=2.0)
    names.add("run/plain", "stays")
    etcd_server.stop()
    threading.Timer(4.0, etcd_server.start).start()
    assert names.get("run/plain") == "stays"  # as soon as the server is back
    time.sleep(3.0)
    assert names.get("run/worker") == "here"
    store = names.store
    store._call(store._leases["run/worker"][0].revoke)  # as if it had expired: the owner rewrites the value
    assert names.wait("run/worker", timeout=5) == "here"
    names.clear_subtree("run")


def test_wrong_etcd_addresses_are_reported():
    pytest.importorskip("etcd3gw")
    with pytest.raises(UsageError, match=r"etcd3_addr=nowhere is not an address; write HOST:PORT"):
        NameOptions("etcd3", etcd3_addr="nowhere").open()
    with pytest.raises(UsageError, match=r"etcd3_addr=127\.0\.0\.1:9: no etcd server responds at this address"):
        NameOptions("etcd3", etcd3_addr="127.0.0.1:9").open()


def test_the_address_of_a_ray_client_is_dialled_by_its_host(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{free_port()}")
    with pytest.raises(UsageError, match=r"no Ray cluster at ray://127\.0\.0\.1:\d+ \(.*Connection refused\)"):
        NameOptions("ray", ray_actor_name="names").open()


@pytest.mark.long
@pytest.mark.xdist_group("ray")
def test_a_ray_cluster_that_requires_a_token_is_not_called_missing():
    """A local cluster of Ray leaves a token in the user's home, and clusters that start later then require the token."""
    pytest.importorskip("ray")
    address = f"127.0.0.4:{free_port()}"
    program = (
        "from areno.name_resolve import NameOptions; from areno.errors import ArenoError\n"
        "try: NameOptions('ray', ray_actor_name='names').open(); print('connected')\nexcept ArenoError as e: print(e)"
    )
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}

    def connect(**more: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | more
        environment["RAY_ADDRESS"] = address
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    with own_folder("ray-token") as folder:
        with open(folder / "head.log", "wb") as log:
            head = subprocess.Popen(
                ray_head(address, folder), env={**os.environ, **token}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_for(lambda: "runtime started" in (folder / "head.log").read_text(), "the head of Ray")
            refused = f"the Ray cluster at {address} requires a token; set RAY_AUTH_MODE=token"
            assert refused in connect(RAY_AUTH_MODE="disabled")
            assert connect(**token).strip() == "connected"
        finally:
            end(head)


@pytest.mark.long
@pytest.mark.xdist_group("ray")
def test_names_of_a_ray_actor_that_has_died_are_rewritten(ray_cluster):
    import ray

    options = NameOptions("ray", ray_actor_name=f"names-{uuid.uuid4().hex}")
    names = Repository(options.open())
    names.add("worker", "here", keepalive_ttl=1.0)
    ray.kill(names.store._actor, no_restart=False)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Repository(options.open()).wait("worker", timeout=1) == "here":
                break
        except (TimeoutError, ArenoError):
            continue
    assert Repository(options.open()).get("worker") == "here"


@pytest.mark.long
@pytest.mark.xdist_group("ray")
def test_a_call_of_a_ray_actor_whose_answer_was_lost_is_not_applied_twice(ray_cluster, monkeypatch):
    import ray

    names = Repository(NameOptions("ray", ray_actor_name=f"names-{uuid.uuid4().hex}").open())
    get, lost = ray.get, []

    def lose_the_first_answer(reference, **options):
        answer = get(reference, **options)
        if not lost:
            lost.append(answer)
            raise ray.exceptions.ActorUnavailableError("the connection broke", b"\0" * 16)
        return answer

    monkeypatch.setattr(ray, "get", lose_the_first_answer)
    names.add("worker", "here")
    assert (lost, names.get("worker")) == ([True], "here")
    lost.clear()
    names.delete("worker")
    assert (lost, names.find_subtree("worker")) == ([True], [])
    names.add("worker", "again")
    with pytest.raises(NameEntryExists):
        names.add("worker", "again")
