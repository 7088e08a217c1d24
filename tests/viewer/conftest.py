"""The browser for tests of the page."""

from __future__ import annotations

import pytest

from tests.support.browser import browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(tab):
    """A blank tab of desktop size; the test fails if its pages reported errors."""
    tab.open("about:blank")
    tab.size(1280)
    tab.dark(False)
    tab.problems.clear()
    yield tab
    assert tab.problems == []
