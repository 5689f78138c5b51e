"""Docstrings as they stand in the code, which are plain text, as reStructuredText.

Formulas hold the signs that reStructuredText reads as markup; outside of `code` they are escaped. A name in `code` that
these pages document becomes a link, and a paper in references.bib a citation.
"""

import re

import citations
from docutils import nodes
from sphinx.addnodes import desc_annotation, pending_xref
from sphinx.util.logging import getLogger

COLON = "\ue000"
WIDEST = 88
MARKUP = re.compile(r"[*|\\]|_(?=\W|$)")
STARRED = re.compile(r"^(\s*)(\*{1,2}\w+)(:.*)$")
HEADING = re.compile(r"^(\s*)(Args|Attributes|Raises|Returns|Yields|References):$")


def escaped(text, within_code=False):
    """Returns a line without markup, but for what is in backticks, in which it may begin."""
    parts = text.split("`")
    return "`".join(
        part if (index + within_code) % 2 else cited(MARKUP.sub(r"\\\g<0>", part)) for index, part in enumerate(parts)
    )


def cited(text):
    """Returns a line with a citation after each "Arjovsky et al. 2016"."""
    return citations.SHORT.sub(lambda match: match[0] + _citation(citations.short(*match.groups())), text)


def _citation(*keys):
    return f" :cite:p:`{','.join(keys)}`" if all(keys) and keys else ""


def _reference(entry, name):
    keys = citations.named(entry)
    if not keys:
        getLogger(__name__).warning("%s names a source that references.bib has not: %s", name, entry)
    return escaped(entry) + _citation(*keys)


def process(app, what, name, target, options, lines):
    """Escapes the lines of a docstring in place, and makes a list of its references."""
    if what in ("attribute", "property"):
        lines[:1] = [line.replace(":", COLON) for line in lines[:1]]  # or napoleon takes the words before it for a type
    entries = iter(citations.references("\n".join(lines)))
    written, section, depth, in_example, within_code = [], "", 0, False, False
    for line in lines:
        heading, starred = HEADING.match(line), STARRED.match(line)
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if heading:
            section, depth = heading[2], len(heading[1])
            line = line.replace("References:", "**References**") + ("\n" if section == "References" else "")
        elif line.strip() and len(line) - len(line.lstrip()) <= depth:
            section = ""
        if section == "References":
            if heading:
                written += [*line.split("\n"), *(f"{' ' * depth}* {_reference(entry, name)}" for entry in entries)]
            elif not line.strip():
                written.append("")
            continue
        if starred and section == "Args":
            line = f"{starred[1]}{starred[2]}{escaped(starred[3])}"
        elif not in_example and not heading:
            item = re.match(r"\s*\* ", line)
            ticks = line.count("`")
            line = (item[0] if item else "") + escaped(line[item.end() :] if item else line, within_code)
            within_code = bool(line) and within_code != ticks % 2
        written.append(line)
    lines[:] = written


def put_back(app, what, name, target, options, lines):
    """Gives back the colons that were hidden."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def readable_signature(app, what, name, target, options, signature, returned):
    """Gives dataclasses' fields that are made anew a default that Sphinx can read, and so the types beside it."""
    return signature and signature.replace("= <factory>", "= ..."), returned


def without_representations(app, domain, objtype, content):
    """Takes away values of attributes that are objects as Python writes them, or too long for a line."""
    for value in [*content.parent.findall(desc_annotation)] if objtype == "attribute" else ():
        text = value.astext()
        if text.startswith(" = ") and ("<" in text or len(text) > WIDEST):
            value.parent.remove(value)


def name_role(role, rawtext, text, lineno, inliner, options=None, content=None):
    """`code` in a docstring: a link where these pages have the name."""
    literal = nodes.literal(rawtext, text, classes=["xref", "py", "py-obj"])
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return [nodes.literal(rawtext, text)], []
    target = re.sub(r"^sk\.", "stiefelkit.", text)
    env = inliner.document.settings.env
    scope = {"py:module": env.ref_context.get("py:module"), "py:class": env.ref_context.get("py:class")}
    facts = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refexplicit": True, "maybe": True}
    return [pending_xref(rawtext, literal, refdoc=env.docname, **facts, **scope)], []


def left_as_code(app, env, node, content):
    """A name that no page has is code, and no mistake."""
    return content if node.get("maybe") else None


def setup(app):
    app.add_role("name", name_role)
    app.config.default_role = "name"
    app.connect("autodoc-process-docstring", process, priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", put_back, priority=600)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("object-description-transform", without_representations)
    app.connect("missing-reference", left_as_code)
    return {"parallel_read_safe": True}
