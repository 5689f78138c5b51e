"""How Sphinx builds these pages: `make docs`. What is made from the package itself stands in `_sphinx`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_sphinx"))
# Kernels that run the pages inherit these.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
os.environ["MATPLOTLIBRC"] = str(HERE / "_static" / "matplotlibrc")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
sys.path.insert(0, str(HERE.parent))

from stiefelkit import __version__  # noqa: E402 (the path comes first)

project = "stiefelkit"
author = "stiefelkit contributors"
project_copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.githubpages",
    "sphinxcontrib.bibtex",
    "sphinx_copybutton",
    "cells",
    "docstrings",
    "formulas",
    "gallery",
    "kernels",
    "links",
    "local",
    "pages",
]
exclude_patterns = ["generated/cost.md", "_build", "_static", "_sphinx"]

# Links into other projects need their inventories, which CI does not fetch.
if os.environ.get("STIEFELKIT_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|numpy|geoopt|collections|typing|dataclasses|abc|enum|pathlib|concurrent|matplotlib|os|rich)(\..*)?",
    ),
    (r"py:.*", r"(Tensor|Module|nn\.\w+|F|M|T|Any|Callable|Iterable|Iterator|Mapping|Sequence|Path|optional|self)"),
    (r"py:.*", r".*\._\w+(\..*)?"),
    (r"py:.*", r"'.*'|dict\[str|Parametrization|Manifold|inspect\.Signature|Optimizer|stiefelkit(\.\w+)+\.[A-Z]"),
    # Inner classes of which a public one is made.
    (
        r"py:.*",
        r"stiefelkit\.(contract\.composite\.Wrapper|testing\.optimizer_cases\.SteppedCase|optim\.deterministic\.space\.\w+|nn\.adapter\.Replacement|nn\.layers\.Layers|nn\.(recurrent|rotation_rnn|reflector_rnn)\.\w+)",
    ),
]

source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # prices and prompts are no formulas
myst_heading_anchors = 4
nb_execution_mode = os.environ.get("STIEFELKIT_DOCS_EXECUTE", "force")
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False  # one entry for arguments that share a sentence
napoleon_custom_sections = ["Returns", "Yields"]  # plain words, not a type and a colon
python_use_unqualified_type_names = True
add_module_names = False
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors = False  # many hosts make their anchors by script

html_theme = "furo"
html_title = "stiefelkit"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_favicon = "_static/mark.svg"
html_theme_options = {
    "sidebar_hide_name": False,
    "light_logo": "mark.svg",
    "dark_logo": "mark.svg",
    "navigation_with_keys": True,
}
html_show_sphinx = False
