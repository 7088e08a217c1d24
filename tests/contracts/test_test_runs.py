"""How the tests themselves run."""

from __future__ import annotations

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only where workers share the tests out")
@pytest.mark.xdist_group("one")
def test_groups_of_tests_are_read(request):
    # Versions of pytest and pytest-xdist that do not fit ignore them silently: what is shared is made by every worker.
    assert request.node.nodeid.endswith("@one")
