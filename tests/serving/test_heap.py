"""The garbage collector runs less often while servers run, and as before once the last of them has stopped."""

from __future__ import annotations

import gc

import pytest

from areno.serving import service
from areno.serving.service import reduced_gc


@pytest.fixture(autouse=True)
def thresholds(monkeypatch):
    """Default thresholds and no running server, because servers of other tests may run in this process."""
    monkeypatch.setattr(service, "_previous_thresholds", [])
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_last_server_to_stop_restores_the_thresholds():
    first, second = reduced_gc(), reduced_gc()
    first.__enter__()
    assert gc.get_threshold()[0] > 700
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > 700
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_thresholds_that_the_program_sets_meanwhile_are_kept():
    with reduced_gc():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_disabled_garbage_collector_stays_disabled():
    gc.set_threshold(0)
    with reduced_gc():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
