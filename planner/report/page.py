"""The report as one file: everything inline, nothing from the network, nothing run but our own.

A content security policy admits exactly this script and this style, by their hashes. The names in
a trace are in the compressed payload only; the page shows them as text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from rich.table import Table

STYLES = ("vendor/uPlot.min.css", "web/page.css", "web/charts.css")
SCRIPTS = (
    "web/payload.js",
    "web/format.js",
    "web/model.js",
    "web/view.js",
    "web/colours.js",
    "web/chart.js",
    "web/memory.js",
    "web/lanes.js",
    "web/rows.js",
    "web/map.js",
    "web/table.js",
    "web/head.js",
    "web/keys.js",
    "web/address.js",
    "web/main.js",
)


def page(payload: str) -> str:
    """The whole file; ``payload`` is base64."""
    style = "\n".join(_read(name) for name in STYLES)
    script = "\n".join(
        [
            _read("vendor/uPlot.iife.min.js"),
            "(() => {",
            '"use strict";',
            *map(_read, SCRIPTS),
            "})();",
        ]
    )
    parts = {
        "script_hash": _hash(script),
        "style_hash": _hash(style),
        "style": style,
        "script": script,
        "payload": payload,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("web/page.html"))


def still_page(title: str, parts: Iterable[str | Table]) -> str:
    """What a command prints, in the dress of the report and without a script. Of ``parts`` a table
    without heads is pairs of a name and what it is; text in brackets is a line of Python."""
    style = "\n".join(map(_read, STYLES[1:]))
    dark = re.search(r':root\[data-theme="dark"\] ({.*?})', style, re.DOTALL)
    assert dark is not None
    style += f"@media (prefers-color-scheme: dark) {{ :root {dark[1]} }}"
    body = "\n".join(_table(part) if isinstance(part, Table) else _text(part) for part in parts)
    parts_of_page = {
        "style_hash": _hash(style),
        "style": style,
        "title": escape(title),
        "body": body,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts_of_page[match[1]], _read("web/still.html"))


def _text(text: str) -> str:
    if text.endswith(")") and "(" in text and " " not in text.partition("(")[0]:
        return f"<section><code>{escape(text)}</code></section>"
    return f'<p class="said">{escape(text)}</p>' if text else ""


def _table(table: Table) -> str:
    columns = [[escape(str(cell)) for cell in column.cells] for column in table.columns]
    if not table.box:
        shown = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in zip(*columns))
        return f'<dl class="facts">{"".join(shown)}</dl>'
    kinds = [" class=text" if column.justify == "left" else "" for column in table.columns]
    shares = ["%" in str(column.header) for column in table.columns]
    heads = "".join(f"<th{kind}>{escape(str(c.header))}" for kind, c in zip(kinds, table.columns))
    rows = (
        "".join(
            f"<td{kind}>{_bar(cell) if is_share else ''}{cell}"
            for kind, is_share, cell in zip(kinds, shares, row)
        )
        for row in zip(*columns)
    )
    title = f"<h2>{escape(str(table.title))}</h2>" if table.title else ""
    cells = "".join(f"<tr>{row}" for row in rows)
    return f'<section>{title}<div class="wide"><table><tr>{heads}{cells}</table></div></section>'


def _bar(percent: str) -> str:
    """As a picture, where it is a number."""
    number = re.match(r"[\d.]+", percent)
    return f'<meter max="100" value="{number[0]}"></meter> ' if number else ""


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
