"""The browser of the tests of the page."""

from __future__ import annotations

import pytest

from tests.support.browser import browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(tab):
    """The tab without a page, at a desktop's size; a test fails if its pages reported errors."""
    tab.open("about:blank")
    tab.size(1280)
    tab.dark(False)
    tab.problems.clear()
    yield tab
    assert tab.problems == []
