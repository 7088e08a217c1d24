"""The list of planted defects stays valid: each line is in its file, and the tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted.defects import DEFECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_can_be_planted_and_its_tests_exist(defect):
    text = (ROOT / defect.file).read_text(encoding="utf-8")
    assert text.count(defect.before) == 1
    assert "\n" not in defect.before + defect.after
    ast.parse(text.replace(defect.before, defect.after))
    for place in defect.tests:
        module, _, test = place.partition("::")
        known = {node.name for node in ast.parse((ROOT / module).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert not test or test in known
