"""One contract for all repositories of names, and what only files can promise."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from areno.errors import UsageError
from areno.experiments import name_resolve
from areno.experiments.name_resolve import NameEntryExists, NameEntryNotFound, Repository, make_store


@pytest.fixture(params=["memory", "nfs"])
def names(request, tmp_path):
    repository = Repository(make_store(request.param, tmp_path / "names"))
    yield repository
    repository.reset()


def test_a_name_has_one_value_until_it_is_deleted(names):
    names.add("u/e/t/key", "one")
    assert names.get("/u/e/t/key/") == "one"
    with pytest.raises(NameEntryExists, match="u/e/t/key has a value already"):
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
        with pytest.raises(UsageError, match="is no name"):
            names.add(wrong, "x")


def test_subtrees_are_of_whole_words(names):
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
    with pytest.raises(TimeoutError, match=r"late has got no value within 0\.2 s"):
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


def test_a_living_owner_keeps_values_alive_and_reset_takes_its_own_away(names):
    names.add("kept", "x", keepalive_ttl=0.4)
    names.add("stays", "y", delete_on_exit=False)
    time.sleep(1.2)
    assert names.get("kept") == "x"
    names.add("short", "z", delete_on_exit=False, keepalive_ttl=0.4)
    names.reset()
    with pytest.raises(NameEntryNotFound):
        names.get("kept")
    assert names.get("stays") == "y"
    time.sleep(0.6)
    with pytest.raises(NameEntryNotFound):  # nobody keeps it alive any more
        names.get("short")
    assert names.find_subtree("short") == []
    names.add("short", "new")
    assert names.get("short") == "new"
    with pytest.raises(UsageError, match="keepalive_ttl=0"):
        names.add("bad", "x", keepalive_ttl=0)


def test_of_many_that_add_a_name_at_once_one_succeeds(names):
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


def test_the_module_has_one_repository_that_can_be_replaced(tmp_path):
    try:
        name_resolve.reconfigure("nfs", tmp_path)
        name_resolve.add("a/b", "1")
        assert Repository(make_store("nfs", tmp_path)).get("a/b") == "1"  # as another process sees it
        assert name_resolve.add_subentry("a", "2") in name_resolve.find_subtree("a")
        assert name_resolve.wait("a/b") == "1"
        assert sorted(name_resolve.get_subtree("a")) == ["1", "2"]
        name_resolve.clear_subtree("a")
        name_resolve.add("c", "3")
        name_resolve.reconfigure("memory")
        assert Repository(make_store("nfs", tmp_path)).find_subtree("c") == []
        assert name_resolve.find_subtree("c") == []
        for kind in ("etcd3", "ray"):
            with pytest.raises(UsageError, match=f"name_resolve.type={kind} is not there yet; use nfs"):
                name_resolve.reconfigure(kind)
        with pytest.raises(UsageError, match="use memory or nfs"):
            name_resolve.reconfigure("redis")
        with pytest.raises(UsageError, match="nfs_record_root"):
            name_resolve.reconfigure("nfs")
    finally:
        name_resolve.reconfigure("memory")


def test_files_of_a_killed_owner_are_gone_after_their_time(tmp_path):
    program = (
        "import sys, time\n"
        "from areno.experiments.name_resolve import Repository, make_store\n"
        "names = Repository(make_store('nfs', sys.argv[1]))\n"
        "names.add('owner', 'x', keepalive_ttl=1.0)\n"
        "names.add('forever', 'y')\n"
        "print('added', flush=True)\n"
        "time.sleep(60)\n"
    )
    names = Repository(make_store("nfs", tmp_path))
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
