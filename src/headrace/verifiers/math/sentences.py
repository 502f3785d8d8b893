r"""The answer in the words of a sentence: ``So x = 5.``, "We get **5** apples", "It is Tuesday!".

Owns: words are taken off only while they lead somewhere. One that denies or doubts, anywhere before
the value, and one that computes or compares, behind the last verb, leave the line as it is, which
no reader of mathematics understands then. Of a longer line its last `MAX_LINE` characters are read.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MAX_LINE = 1_000
"""An answer and its sentence are shorter; some searches are quadratic."""
_START = re.compile(
    r"(?:[#>\s]|[-*\u2022]\s|\u2234|\u21d2|\u2192|=>|->|\\(?:therefore|implies|Rightarrow)(?![A-Za-z]))*"
)
_END = re.compile(
    r"(?:\s|[\u2713\u2714\u2705\u2611\u220e\u25a0\u25a1\ufe0f]|\\(?:blacksquare|checkmark|q?quad)(?![A-Za-z]))+\Z"
)
_VERB = re.compile(r"(?<![A-Za-z\\])(?:is|are|was|were|be|equals|equal to)(?![A-Za-z])[\s,:]*")
_WORD = re.compile(
    r"(?:[A-Za-z]{2,}(?:['\u2019-][A-Za-z]+)*|I['\u2019][a-z]+|I|a(?=\s+[A-Za-z]{2}))(?![A-Za-z(_^{])"
)
_GAP = re.compile(r"[\s,:]*")
_SIGN = re.compile(r"[=<>+*/^_\u2264\u2265-]")
_LONG_WORD = 4
"""Letters of a word that may stand before a sign: ``Area = 5``; fewer are a product, ``ab = 5``."""
_LABEL = re.compile(r"(?:\A|\s)\$?([A-Za-z])\$?\s*\Z")
_VALUE = re.compile(r"[-+\d\\$(\[{|\u221a\u00b1\u2212]|\.\d|[A-Za-z](?![A-Za-z])")
_TAIL = re.compile(
    r"(?:,?\s+(?:which\s+is|is|are|as)\s+(?:the|our|a)\s+(?:[a-z]+\s+){0,2}"
    r"(?:answer|solution|value|result|root|minimum|maximum)s?"
    r"|(?<=[\w.})])\s+(?:in\s+total|in\s+all|altogether|long|tall|wide|high|deep))\s*[.!]*\Z"
)
"""What may be said of a value behind it."""
_REASON = re.compile(r",?\s(?:since|because|as)\s.*\Z", re.DOTALL)
_NAMES = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt cbrt pi max "
    "min gcd lcm abs floor ceil mod infty infinity inf det choose sgn"
)
_DENY = _words(
    "not no never nor neither cannot without except either if unless whether maybe perhaps "
    "possibly wrong incorrect false instead unlike"
)
_COMPUTE = _words(
    "negative minus plus times half twice double triple third quarter than least most more less "
    "fewer greater larger smaller over under above below between root square squared cube cubed "
    "factorial logarithm modulo divided multiplied increased decreased reduced sum difference "
    "product quotient reciprocal inverse opposite percent power raised remainder hundred thousand "
    "million billion dozen divisor multiple factor exceed exceeds"
)


def answer_of(line: str, *, is_sentence: bool = False) -> str:
    """Return what a line comes to: what stands behind its words, or behind its last verb.

    ``is_sentence``: it goes on with what stood before, as in "the answer is ...". An exclamation
    mark that ends words ends the sentence; behind a mere formula it is a factorial.
    """
    if len(line) > MAX_LINE:
        line = line[-MAX_LINE:]
    text = _END.sub("", line)
    start = _START.match(text)
    text = _TAIL.sub("", text[start.end() :] if start else text)
    verb = next(reversed(list(_VERB.finditer(text))), None)
    if verb is not None:
        if not _leads(text[: verb.start()]):
            return line
        behind = _behind_words(text[verb.end() :])
        if behind is None:
            return line
        if _VALUE.match(behind):
            label = _LABEL.search(text[: verb.start()])
            value = _without_end(behind)
            return f"{label[1]} = {value}" if label else value
    behind = _behind_words(text)
    if behind is None:
        return line
    if not behind.strip(" .!"):
        # Words alone: "It is Tuesday."
        return text if verb is None else text[verb.end() :]
    return _without_end(behind) if is_sentence or behind != text else behind


def without_reason(text: str) -> str:
    """Return an answer without the reasons that a sentence gives for it."""
    return _REASON.sub("", text)


def _behind_words(text: str) -> str | None:
    """Return what stands behind the first words of ``text``; None where they turn its meaning."""
    at = 0
    while (word := _WORD.match(text, at)) and word[0].casefold() not in _NAMES:
        gap = _GAP.match(text, word.end())
        assert gap is not None
        # "Sum: 5" names what is 5.
        if _has(word[0], _DENY if ":" in gap[0] else _DENY | _COMPUTE):
            return None
        if len(word[0]) < _LONG_WORD and _SIGN.match(text, gap.end()):
            break
        at = gap.end()
    return text[at:]


def _leads(text: str) -> bool:
    """Whether nothing in the words before a verb denies or doubts what follows it."""
    return not any(_has(word[0], _DENY) for word in _WORD.finditer(text))


def _has(word: str, words: frozenset[str]) -> bool:
    folded = word.casefold().replace("\u2019", "'")
    return any(part in words for part in folded.split("-")) or folded.endswith("n't")


def _without_end(text: str) -> str:
    plain = text.rstrip("\u3002 \t\r")
    return plain[:-1] if plain.endswith("!") and "$" not in plain else plain
