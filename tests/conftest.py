"""Fixtures that many tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import examples

# Background jobs of a shell ignore it, and child processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No deadline: how long an example takes depends on the machine.
settings.register_profile("areno", deadline=None, max_examples=examples(100))
settings.load_profile("areno")

DATA = Path(os.environ.get("ARENO_TEST_DATA", Path(__file__).parents[1].parent / "shared" / "data"))


@pytest.hookimpl(wrapper=True)  # around xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """One worker runs all tests of a module that has shared fixtures, so that these are made once."""
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        scopes = {fixtures[-1].scope for fixtures in info.name2fixturedefs.values()} if info else set()
        if item.get_closest_marker("xdist_group") is None and "module" in scopes:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        if info and "taught_checkpoint" in info.names_closure:  # training it takes seconds
            item.add_marker(pytest.mark.xdist_group("taught"))
        if item.get_closest_marker("long") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))
    yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All test processes, including child processes, share one cache and leave the user's cache alone."""
    base = tmp_path_factory.getbasetemp()
    whole = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # all workers of one run
    os.environ.setdefault("ARENO_CACHE_DIR", str(whole / "cache"))


@pytest.fixture(scope="session", autouse=True)
def _forked_ranks() -> Iterator[None]:
    """Ranks started by tests are forked from a process with all imports done; commands start their ranks as usual."""
    from areno.launch import local
    from tests.support.cli import forked_rank

    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(local, "start_process", forked_rank)
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama checkpoint with a chat tokenizer."""
    from tests.support.tiny import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "llama")


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """Folder of real GSM8K problems; skips the test if the data is missing."""
    folder = DATA / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"GSM8K is missing ({folder}); set ARENO_TEST_DATA")
    return folder
