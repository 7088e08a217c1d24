"""Logging setup: where each line goes, and that closing leaves nothing behind."""

import io
import logging
import os
import re
import signal

import pytest

from areno.errors import UsageError
from areno.observability.logs import route_console, setup_logging
from areno.storage.run_dir import RunDirectory

logger = logging.getLogger("areno.tests.logs")


@pytest.fixture(autouse=True)
def no_level_in_the_environment(monkeypatch):
    monkeypatch.delenv("ARENO_LOG_LEVEL", raising=False)


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory(tmp_path / "run")


def test_console_lines_have_the_documented_format():
    stream = io.StringIO()
    with setup_logging(None, stream=stream):
        logger.info("epoch=%d stage=epoch_start", 0)
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO areno\.tests\.logs: epoch=0 stage=epoch_start\n"
    assert re.fullmatch(line, stream.getvalue())


def test_the_log_file_gets_everything_and_the_console_its_level(run_dir):
    stream = io.StringIO()
    with setup_logging(run_dir, level="warning", stream=stream):
        logger.debug("one")
        logger.info("two")
        logger.warning("three")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["three"]
    assert [line.split(": ")[1] for line in run_dir.log_path.read_text().splitlines()] == ["one", "two", "three"]


def test_the_environment_sets_the_console_level(monkeypatch):
    monkeypatch.setenv("ARENO_LOG_LEVEL", "ERROR")
    stream = io.StringIO()
    with setup_logging(None, stream=stream):
        logger.warning("quiet")
        logger.error("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_an_unknown_level_is_a_usage_error_that_lists_the_levels(monkeypatch):
    monkeypatch.setenv("ARENO_LOG_LEVEL", "LOUD")
    with pytest.raises(UsageError, match=r"'LOUD' of the environment variable ARENO_LOG_LEVEL is unknown.*DEBUG, INFO"):
        setup_logging(None)
    with pytest.raises(UsageError, match="log level 'chatty' is unknown"):
        setup_logging(None, level="chatty")


def test_repeated_setup_does_not_duplicate_lines(run_dir):
    stream = io.StringIO()
    first = setup_logging(run_dir, stream=stream)
    second = setup_logging(run_dir, stream=stream)
    logger.info("once")
    first.close()
    logger.info("still there")
    second.close()
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["once", "still there"]
    assert len(run_dir.log_path.read_text().splitlines()) == 2


def test_a_resumed_run_appends_to_its_log(run_dir):
    for text in ("before", "after"):
        with setup_logging(run_dir, stream=io.StringIO()):
            logger.info(text)
    assert [line.split(": ")[1] for line in run_dir.log_path.read_text().splitlines()] == ["before", "after"]


def test_a_log_file_that_cannot_be_written_is_a_usage_error_that_names_it(run_dir):
    run_dir.create().log_path.mkdir()
    with pytest.raises(UsageError, match=rf"log file {run_dir.log_path} cannot be written: Is a directory; .* choose"):
        setup_logging(run_dir)
    assert not logging.getLogger("areno").handlers


def test_close_restores_the_logger():
    root = logging.getLogger("areno")
    before = (list(root.handlers), root.level, root.propagate)
    with setup_logging(None, level="DEBUG", stream=io.StringIO()), setup_logging(None, stream=io.StringIO()):
        assert len(root.handlers) == len(before[0]) + 1
    assert (list(root.handlers), root.level, root.propagate) == before


def test_records_propagate_to_the_handlers_of_a_program_that_uses_areno(caplog):
    with setup_logging(None, stream=io.StringIO()):
        logger.warning("seen by both")
    assert "seen by both" in caplog.text


@pytest.mark.parametrize(("level", "with_run_dir", "shown"), [(None, True, 1), ("INFO", True, 2), (None, False, 2)])
def test_a_live_display_lets_info_lines_through_only_if_asked_for_or_without_a_log_file(
    run_dir, level, with_run_dir, shown
):
    stream, through = io.StringIO(), []
    with setup_logging(run_dir if with_run_dir else None, level=level, stream=stream):
        route_console(through.append)
        logger.info("stage=train_start")
        logger.warning("look here")
        route_console(None)
    assert stream.getvalue() == ""
    assert len(through) == shown
    assert through[-1].endswith("look here")


def test_sigusr1_writes_the_stacks_of_all_threads_to_the_log(tmp_path):
    with setup_logging(RunDirectory(tmp_path / "run")):
        os.kill(os.getpid(), signal.SIGUSR1)
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "most recent call first" in text
    assert f"in {test_sigusr1_writes_the_stacks_of_all_threads_to_the_log.__name__}" in text
