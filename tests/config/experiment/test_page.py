"""The page of all settings agrees with the declarations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from areno.config.experiment import GRPOConfig, config_from
from areno.config.experiment.setting_declaration import settings_of

REPO = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("make_configuration", REPO / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_make_configuration_writes(page):
    assert page.PAGE.read_text(encoding="utf-8") == page.render(), "run: python docs/make_configuration.py"


def test_every_class_is_in_one_group_and_every_field_on_the_page(page):
    names = [name for group in page.GROUPS.values() for name in group]
    assert sorted(names) == sorted(page.declared())
    text = page.render()
    for name, declaration in page.declared().items():
        section = text.split(f"### {name}\n")[1].split("\n### ")[0]
        for field, entry in settings_of(declaration).items():
            assert f"| `{field}` |" in section or entry.owner != name, f"{name}.{field}"


def test_the_example_on_the_page_is_accepted(page):
    block = page.render().split("```yaml\n")[1].split("```")[0]
    config = config_from(yaml.safe_load(block), GRPOConfig)
    assert config.actor.optimizer is not None
    assert config.actor.optimizer.lr == 1e-5
