"""Configuration of the documentation site: ``make docs`` builds it with Sphinx."""

import re
from typing import Any

from areno import __version__

project = "areno"
author = "The areno authors"
copyright = author
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["__pycache__", "_build"]
html_theme = "furo"
html_title = f"areno {release}"
html_copy_source = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nitpicky = False
copybutton_exclude = ".linenos, .gp, .go"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
suppress_warnings = ["ref.python"]  # several classes have methods of the same name

# Links to files outside the site (examples, the contribution guide) become their text, which says where the files are.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def _unlink(_app: Any, _page: str, source: list[str]) -> None:
    source[0] = _OUTSIDE.sub(r"\1", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _unlink)
