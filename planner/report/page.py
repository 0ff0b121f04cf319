"""The report as one file: everything inline, nothing from the network, nothing run but our own.

A content security policy admits exactly this script and this style, by their hashes. The names in
a trace are in the compressed payload only; the page shows them as text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

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


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
