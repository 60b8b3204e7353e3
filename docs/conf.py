"""How `make docs` builds the site."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import pfedme  # noqa: E402

project = "pfedme"
author = "pfedme maintainers"
copyright = "pfedme maintainers, Apache-2.0"
version = release = pfedme.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "myst_parser",
    "commands",
    "docstrings",
    "gallery",
]
exclude_patterns = ["_build", "_ext", "runs"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

# The interface.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False
maximum_signature_line_length = 80
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

# Types of other packages, and of what is not for users, have no page here; there is no network to ask.
nitpick_ignore_regex = [
    (r"py:(class|obj|data)", r"(jax|jaxlib|np|numpy|pl|polars|os|collections|typing|pathlib|optuna)(\..*)?"),
    (r"py:(class|obj)", r"(pfedme(\.\w+)+\.)?[A-Z]\w*|dict\[str"),
]

html_theme = "furo"
html_title = "pfedme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2e8", "color-brand-content": "#7fb2e8"},
}
pygments_style = "friendly"
highlight_language = "text"
