"""Sphinx settings: ``nox -s docs`` builds the site with every warning an error."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

import dynamiq_core

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.writers.html5 import HTML5Translator

project = "DynamiQ"
copyright = "the DynamiQ authors"
release = dynamiq_core.__version__  # all four packages have one version

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
# Below results, folders hold parts of pages.
exclude_patterns = ["_build", "results/codecs/*", "results/network/*", "results/time-to-accuracy/*"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "DynamiQ"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"

default_role = "code"
add_module_names = False
maximum_signature_line_length = 80
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = ["mpi4py"]  # which needs an MPI library to be imported
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
doctest_test_doctest_blocks = ""  # examples in docstrings are run by pytest, with the names of their module
napoleon_use_ivar = True
python_use_unqualified_type_names = True

# Names of other projects are printed, not linked: the site builds without a network. A name of ours must resolve;
# type variables have no page of their own.
_others = "|".join(sorted({*sys.stdlib_module_names, "MPI", "mpi4py", "numpy", "torch"}))
nitpick_ignore_regex = [("py:.*", rf"({_others})(\..*)?"), ("py:.*", r"(dynamiq_[\w.]+\.)?[A-Z]"), ("py:.*", "Tensor")]
_number = re.compile(r"[-+−]?\d[\d,.]*(e[-+]?\d+|–\d+)?( ms| MB| %)?( \([-\d,.x %]+\))?")
# Types that stand in a public signature, but that no user makes or names.
nitpick_ignore = [
    ("py:class", "Transfer"),
    ("py:class", "dynamiq_core.rounding.Key"),
    ("py:class", "dynamiq_transport.local._Group"),
]


def resolve_where_it_is_exported(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element
) -> Element | None:
    """Link ``dynamiq_core.protocol.Codec``, as annotations spell it, to ``dynamiq_core.Codec``, its public name."""
    match = re.fullmatch(r"(dynamiq_\w+)\.(.+)", node.get("reftarget", ""))
    if node.get("refdomain") != "py" or match is None:
        return None
    package, path = match[1], match[2].split(".")
    domain = env.domains["py"]
    for start in range(1, len(path)):
        public = ".".join([package, *path[start:]])
        found = domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], public, node, contnode)
        if found is not None:
            return found
    return None


def skip_tuple_fields(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out the members of NamedTuples that say nothing: the signature and the class docstring have them."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def mathml(node: nodes.math | nodes.math_block, display: str) -> str:
    """A formula as MathML: browsers draw it themselves, without a script and without a network."""
    markup = convert(node.astext(), display=display)
    if "\\" in markup:
        logging.getLogger(__name__).warning("not all of the formula was understood: %s", node.astext(), location=node)
    return markup


def visit_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Draw a formula within a line."""
    translator.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def visit_math_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Draw a formula of its own."""
    translator.body.append(f'<div class="math">{mathml(node, "block")}</div>')
    raise nodes.SkipNode


def sort_cells(app: Sphinx, doctree: nodes.document) -> None:
    """Tell the style which cells of tables hold a number, among others of their column, and which hold much text."""
    for body in doctree.findall(nodes.tbody):
        for column in zip(*(row.children for row in body), strict=True):
            numbers = [cell for cell in column if _number.fullmatch(cell.astext())]
            for cell in numbers if 2 * len(numbers) > len(column) else []:
                cell["classes"].append("number")
            for cell in column:
                if len(cell.astext()) > 24:
                    cell["classes"].append("prose")


def setup(app: Sphinx) -> None:
    """Sphinx's entry point for what the settings alone cannot say."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None))
    app.connect("doctree-read", sort_cells)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("missing-reference", resolve_where_it_is_exported)
