"""The table of the features of both front ends is correct: every option and setting in it exists."""

from __future__ import annotations

import pytest

from areno.cli.plan import TUNE
from areno.config import TrainOptions
from areno.config.experiment import DPOConfig, PPOConfig
from areno.config.experiment.setting_declaration import paths_of
from areno.config.options import options_of
from areno.experiments.run_experiment import DRY_RUN
from docs.make_front_ends import ALWAYS, FEATURES, PAGE, render

FLAGS = {entry.flag for entry in options_of(TrainOptions)}
SETTINGS = {*paths_of(PPOConfig), *paths_of(DPOConfig), DRY_RUN, f"areno plan {TUNE}"}


def test_the_page_is_what_make_front_ends_writes():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python docs/make_front_ends.py"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_options_and_settings_exist(feature):
    assert feature.flags or feature.settings
    assert set(feature.flags) - {ALWAYS} <= FLAGS
    assert set(feature.settings) - {ALWAYS} <= SETTINGS
