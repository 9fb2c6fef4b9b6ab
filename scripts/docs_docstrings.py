"""Docstrings are written for editors and for ``help``; this makes Markdown of the few marks that are not."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")
_LONE_COLONS = re.compile(r"^\s*::$", re.MULTILINE)
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


class RolesAsCode(griffe.Extension):
    """``:class:`Name``` becomes code, and the colons before an indented block become one."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _LITERAL_BLOCK.sub(":", _LONE_COLONS.sub("", text))
