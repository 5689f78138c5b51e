"""Formulas as MathML, which browsers typeset themselves, in STIX Two Math, which the pages bring along.

Formulas are LaTeX with three liberties that keep docstrings readable in a terminal: the signs in `SIGNS` stand for
their commands, √p is a root, and a word of three letters or more is a name, as are those in `NAME`. `mathml` needs no
Sphinx.
"""

import html
import logging
import re
import unicodedata
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from latex2mathml.converter import convert_to_element

SIGNS = {
    "−": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "‖": r"\| ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "←": r"\leftarrow ",
    "→": r"\to ",
    "↦": r"\mapsto ",
    "∈": r"\in ",
    "±": r"\pm ",
    "⊙": r"\odot ",
    "⊗": r"\otimes ",
    "∞": r"\infty ",
    "∂": r"\partial ",
    "...": r"\dots ",
}
ROOT = re.compile(r"√(\w+|\{[^{}]*\})")
LONG = 32
"""Characters beyond which a formula may be wider than a phone."""
NAME = re.compile(r"\\[A-Za-z]+(?:\{[A-Za-z ]*\})?|[a-z]{3,}|\b(?:lr|tr|qr|Re|Im|St|SO|Hess)\b")
RANGES = ((0x20, 0x7F), (0xA0, 0x100), (0x391, 0x3F7), (0x2010, 0x2070), (0x20D0, 0x20F0), (0x210E, 0x210F))
RANGES += ((0x2102, 0x214A), (0x2190, 0x22FF), (0x27E6, 0x27EC), (0x1D434, 0x1D468), (0x1D6A4, 0x1D71B))


class FormulaError(ValueError):
    """A formula that cannot be typeset."""


def latex(formula: str) -> str:
    """Returns a formula without the three liberties."""
    text = unicodedata.normalize("NFC", ROOT.sub(lambda root: rf"\sqrt{{{root[1].strip('{}')}}}", formula))
    text = re.sub("|".join(map(re.escape, SIGNS)), lambda sign: SIGNS[sign[0]], text)
    return NAME.sub(lambda name: name[0] if name[0][0] == "\\" else rf"\operatorname{{{name[0]}}}", text)


def mathml(formula: str, display: str = "inline") -> str:
    """Returns a formula as MathML that keeps its LaTeX as a text for screen readers."""
    try:
        made = convert_to_element(latex(formula), display=display)
    except Exception as error:  # a class for every mistake
        raise FormulaError(f"{formula}: {type(error).__name__}") from error
    for part in made.iter():
        part.text = part.text and html.unescape(part.text)
        if part.tag == "mo" and part.text in ("‖", "|"):
            part.set("stretchy", "false")  # or bars grow with what stands beside them
    unknown = [part.text for part in made.iter() if re.search(r"[\\{}]\w|�", part.text or "")]
    if unknown or not "".join(made.itertext()).strip():
        raise FormulaError(f"{formula}: {unknown or 'nothing to typeset'}")
    made.set("alttext", " ".join(formula.split()))
    for row in [*made.iter()]:
        _space_names(row)
    return tostring(made, "unicode")


def _space_names(row: Element):
    """Gives names the spaces of TeX: a thin one, and none before a bracket."""
    for index in reversed(range(len(row))):
        part = row[index]
        if part.tag == "mo" and re.fullmatch("[A-Za-z]{2,}", part.text or ""):
            part.tag = "mi"
            if row.tag == "mrow" and row[index + 1 :] and row[index + 1].tag != "mo":
                row.insert(index + 1, Element("mspace", width="0.17em"))
            if row.tag == "mrow" and index and row[index - 1].tag != "mo":
                row.insert(index, Element("mspace", width="0.17em"))


def _visit(display):
    from docutils import nodes
    from sphinx.util.logging import getLogger

    def visit(self, node):
        try:
            text = mathml(node.astext(), display)
        except FormulaError as error:
            getLogger(__name__).warning("No formula: %s", error, location=node)
            text = self.encode(node.astext())
        tag = "div" if display == "block" else "span"
        long = " long" if len(node.astext()) > LONG else ""
        self.body.append(f'<{tag} class="math{long}">{text}</{tag}>')
        raise nodes.SkipNode

    return visit


def write_font(app, exception):
    """Writes the glyphs that formulas are made of, a tenth of the font, beside the other static files."""
    path = Path(app.outdir) / "_static" / "STIXTwoMath.woff"
    if exception or app.builder.format != "html" or path.exists():
        return
    import ziamath
    from fontTools import subset

    logging.getLogger("fontTools").setLevel(logging.WARNING)
    options = subset.Options(layout_features=["*"], flavor="woff", notdef_outline=True)
    font = subset.load_font(str(Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[code for first, end in RANGES for code in range(first, end)])
    subsetter.subset(font)
    subset.save_font(font, str(path), options)


def setup(app):
    app.add_html_math_renderer("mathml", (_visit("inline"), None), (_visit("block"), None))
    app.config.html_math_renderer = "mathml"
    app.connect("build-finished", write_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
