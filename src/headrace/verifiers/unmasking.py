"""What a program names in a roundabout way, written out: ``getattr(os, "_ex" + "it")``.

Owns: text in, text out, and nothing is executed or parsed, for Python's own parser can bring down
the process that calls it. Folded are what stands in a program as constants: pieces of text that are
added, joined, reversed or spelled by numbers, names that are bound to them, attributes that are
asked for by text, and modules under another name. Every pattern reads a bounded piece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice

_HINTS = ("getattr", "__import__", "import_module", "__dict__", "vars(", "globals(", " as ")
"""Without one of them nothing is named in a roundabout way."""
_MAX_NAMES = 100
_MAX_ALIASES = 20

_PIECE = r"(?:\"[^\"\\\n]{0,60}\"|'[^'\\\n]{0,60}')"
_ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u00([0-9A-Fa-f]{2})|\\([0-7]{3})")
_CHR = re.compile(r"\bchr\(\s?(\d{2,3})\s?\)")
_REVERSED = re.compile(rf"({_PIECE})\s?\[\s?::\s?-1\s?\]")
_JOINED = re.compile(
    rf"(?:\"\"|'')\.join\(\s?[\[(]((?:\s{{0,4}}{_PIECE}\s{{0,4}},?){{1,30}})[\])]\s?\)"
)
_ADDED = re.compile(rf"{_PIECE}(?:\s{{0,4}}\+?\s{{0,4}}{_PIECE}){{1,30}}")
_ONE_PIECE = re.compile(_PIECE)
_BOUND = re.compile(
    rf"(?:^|[;\n])[ \t]{{0,40}}(\w{{1,40}})[ \t]?=[ \t]?({_PIECE})[ \t]{{0,4}}(?=$|[;\n#])"
)
_ADDED_NAMES = re.compile(rf"(?:\w{{1,40}}|{_PIECE})(?:\s?\+\s?(?:\w{{1,40}}|{_PIECE})){{0,10}}")
_IMPORTED = re.compile(rf"\b(?:__import__|(?:importlib\s?\.\s?)?import_module)\(\s?({_PIECE})\s?\)")
_ASKED = re.compile(
    rf"\bgetattr\(\s?([\w.]{{1,60}})\s?,\s?({_ADDED_NAMES.pattern})\s?(?:,[^)\n]{{0,40}})?\)"
)
_LOOKED_UP = re.compile(
    rf"(?:\bvars\(\s?([\w.]{{1,60}})\s?\)|\b([\w.]{{1,60}})\.__dict__)\s?\[\s?({_PIECE})\s?\]"
)
_ALIAS = re.compile(
    r"\bimport[ \t]{1,4}(os|sys|posix|gc|inspect|builtins|unittest|pytest)"
    r"[ \t]{1,4}as[ \t]{1,4}(\w{1,40})"
)


def unmasked(text: str) -> str:
    """Return ``text`` with constants folded; itself where nothing in it is roundabout."""
    if not any(hint in text for hint in _HINTS):
        return text
    text = _ESCAPE.sub(lambda found: chr(_code(found)), text)
    text = _CHR.sub(lambda found: f'"{chr(int(found[1]))}"', text)
    text = _REVERSED.sub(lambda found: f'"{_content(found[1])[::-1]}"', text)
    text = _JOINED.sub(lambda found: _together(found[1]), text)
    text = _ADDED.sub(lambda found: _together(found[0]), text)
    names = {found[1]: found[2] for found in islice(_BOUND.finditer(text), _MAX_NAMES)}
    text = _IMPORTED.sub(lambda found: _content(found[1]), text)
    # Twice, for one inside the other.
    for _ in range(2):
        text = _ASKED.sub(lambda found: _attribute(found, names), text)
    text = _LOOKED_UP.sub(lambda found: f"{found[1] or found[2]}.{_content(found[3])}", text)
    aliases = {found[2]: found[1] for found in _ALIAS.finditer(text)}
    for alias, module in islice(aliases.items(), _MAX_ALIASES):
        text = re.sub(rf"\b{alias}\.", f"{module}.", text)
    return text


def _code(found: re.Match[str]) -> int:
    return int(found[3], 8) if found[3] else int(found[1] or found[2], 16)


def _content(piece: str) -> str:
    return piece[1:-1]


def _together(pieces: str) -> str:
    return '"' + "".join(_content(found[0]) for found in _ONE_PIECE.finditer(pieces)) + '"'


def _attribute(found: re.Match[str], names: Mapping[str, str]) -> str:
    """Return ``os._exit`` for ``getattr(os, a + b)``; what it was where a name is not known."""
    parts = [part.strip() for part in found[2].split("+")]
    pieces = [part if part[:1] in {'"', "'"} else names.get(part) for part in parts]
    known = [_content(piece) for piece in pieces if piece is not None]
    return f"{found[1]}.{''.join(known)}" if len(known) == len(pieces) else found[0]
