"""The command that installs an extra installs this project, not another one of the same name."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from areno.config import packages
from areno.config.packages import install_command

REPO = Path(__file__).parents[2]


def test_in_a_clone_the_command_names_its_folder():
    assert shlex.split(install_command("serve")) == [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--editable",
        f"{REPO}[serve]",
    ]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """areno as a package in site-packages, with ``origin`` as pip's record of where it came from."""

    def make(origin):
        info = tmp_path / "areno-0.1.0.dist-info"
        info.mkdir()
        needs = 'Requires-Dist: torch>=2.11\nRequires-Dist: fastapi>=0.115; extra == "serve"\n'
        needs += "Requires-Dist: uvloop>=0.21; platform_system != 'Windows' and extra == 'serve'\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areno\nVersion: 0.1.0\n{needs}")
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.setattr(packages, "_PACKAGE", tmp_path / "areno")
        monkeypatch.setattr(packages, "distribution", lambda _: metadata.PathDistribution(info))

    return make


def test_after_an_install_from_a_folder_the_command_names_that_folder(installed, tmp_path):
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert shlex.split(install_command("lora"))[4:] == [f"{clone}[lora]"]


@pytest.mark.parametrize("origin", [None, {"url": "file:///gone", "dir_info": {}}, {"url": "https://host/a.whl"}])
def test_without_a_folder_the_command_names_the_packages_of_the_extra(installed, origin):
    installed(origin)
    assert shlex.split(install_command("serve"))[4:] == ["fastapi>=0.115", "uvloop>=0.21"]
