r"""Many spellings of one thing, before anything is read: macros of style, brackets, currencies.

Rewrites text to text, in passes that are each linear. Owns: a rewriting never changes what a text
says; what has no other spelling in `symbols` or `parser` stays, and is unreadable there.
"""

from __future__ import annotations

import re

_SUPER = (
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207d\u207e\u207f"
)
_SUB = "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u208a\u208b"
_PLAIN_SUPER = str.maketrans(_SUPER, "0123456789+-()n")
_PLAIN_SUB = str.maketrans(_SUB, "0123456789+-")
_RAISED = re.compile(f"[{_SUPER}]+")
_LOWERED = re.compile(f"[{_SUB}]+")

_REWRITINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # How it looks.
        (r"\\textcolor\s*\{[A-Za-z]{1,20}\}|\\color\s*\{[A-Za-z]{1,20}\}", ""),
        (r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bold|boldmath)(?![A-Za-z])", ""),
        (r"\\underline\s*\{(\s*[-+]?[\d.,]+\s*)\}", r"\1"),
        (r"\\displaylimits(?![A-Za-z])", ""),
        # Names of signs that are there.
        (r"\\(?:nice|s|x|flat)frac(?![A-Za-z])", r"\\frac"),
        (r"\\lparen(?![A-Za-z])", "("),
        (r"\\rparen(?![A-Za-z])", ")"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lor|vee)(?![A-Za-z])|\u2228", " or "),
        (r"\\(?:land|wedge)(?![A-Za-z])|\u2227", " and "),
        (r"\\surd(?![A-Za-z])", r"\\sqrt "),
        (r"\\uppi(?![A-Za-z])", r"\\pi "),
        (r"\\(R|Z|Q|N)(?![A-Za-z])", r"\\mathbb{\1}"),
        (r"\\abs\s*\{([^{}]*)\}", r"|\1|"),
        (r"\\forall(?![A-Za-z])", ""),
        (r"\+\s*/\s*[-\u2212]", r"\\pm "),
        (r"\\cr(?![A-Za-z])|\\\\\s*\[\s*[\d.]{1,6}\s*(?:pt|em|ex|mm|cm)\s*\]", r"\\\\ "),
        # Behind a digit a raised letter o is a degree.
        (
            r"(?<=\d)\s*(?:\u00ba|\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?o(?![A-Za-z])\}{0,2})",
            r"^\\circ ",
        ),
        (r"\\(?:mathdollar|textdollar)(?![A-Za-z])|\\text\s*\{\s*\\?\$\s*\}", r"\\$"),
        (r"\\text\s*\{\s*\\?%\s*\}", r"\\%"),
        (r"\bper cent\b", "percent"),
        (r"\bsq\.\s*", "sq "),
        # Separators and signs in groups of their own, and thousands of other countries.
        (r"\u2236|\{\s*:\s*\}", ":"),
        (r"\{\s*([-+])\s*\}", r"\1"),
        (r"(?<=\d)\\text\s*\{\s*,\s*\}(?=\d{3})", "{,}"),
        (r"\\text\s*\{\s*,\s*\}", ", "),
        (r"(?<![\d'])(\d{1,3})'(?=\d{3}(?![\d']))", r"\1{,}"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        # Numbers of combinations.
        (
            r"(?:\{\s*\})?\s*[_^]\s*\{?\s*(\d{1,4})\s*\}?\s*(?:\\mathrm\s*\{\s*C\s*\}|C)\s*_\s*(?:\{\s*(\d{1,4})\s*\}|(\d))",
            r"\\binom{\1}{\2\3}",
        ),
        # An integral's constant in words; a map by its arrow.
        (r"\+\s*(?:\\(?:text|mathrm)\s*\{\s*const(?:ant|\.)?\s*\}|const(?:ant)?\b)\s*\Z", "+C"),
        (r"\A\s*([fgh])\s*(?::|\\colon)\s*([a-z])\s*\\mapsto(?![A-Za-z])", r"\1(\2)="),
        # What leads to the answer is none of it.
        (
            r"\A\s*\\text\s*\{\s*(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer(?:\s+is)?\s*[:=]?\s*\}\s*[:=]?",
            "",
        ),
        (
            r"\A(?:\s|=|\u2248|\u2192|\u21d2|\u2234|=>|->|\\(?:approx|implies|therefore|Rightarrow|rightarrow|to|quad|,|;)(?![A-Za-z]))+",
            "",
        ),
    )
)
_INTERVAL = re.compile(r"([\[\](])((?:[^\[\]()]|\([^\[\]()]*\))*)([\[\]])")
_SEPARATOR = re.compile(r"[,;]")


def rewritten(text: str) -> str:
    """Return ``text`` in the spelling that `spelling` and `parser` read."""
    text = _RAISED.sub(_raised, text)
    text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_PLAIN_SUB)}}}", text)
    for pattern, replacement in _REWRITINGS:
        text = pattern.sub(replacement, text)
    return text


def _raised(found: re.Match[str]) -> str:
    """Return ``^2`` for one digit, which may stand in a text group, and ``^{-1}`` for more."""
    plain = found[0].translate(_PLAIN_SUPER)
    return f"^{plain}" if plain.isdigit() and len(plain) == 1 else f"^{{{plain}}}"


def with_round_brackets(text: str) -> str:
    """Write ``]1, 2]`` as ``(1, 2]``: a bracket that opens outwards leaves its bound out."""
    if "[" not in text and "]" not in text:
        return text
    return _INTERVAL.sub(_inward, text)


def _inward(found: re.Match[str]) -> str:
    opener, body, closer = found.groups()
    if len(_SEPARATOR.findall(body)) != 1:
        return found[0]
    return ("(" if opener == "]" else opener) + body + (")" if closer == "[" else closer)
