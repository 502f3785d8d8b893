"""What a command of LaTeX, a Unicode sign or a bare word stands for.

Tables alone. A command that is in none of them is unreadable: nothing is ever dropped for being
unknown.
"""

from __future__ import annotations

from headrace.verifiers.numbers import DASHES


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GREEK = _words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu "
    "nu xi rho varrho sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta "
    "Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar imath jmath aleph"
)
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth log ln lg exp "
    "sqrt cbrt gcd lcm max min abs floor ceil det Re Im arg sgn arsinh arcosh artanh"
)
ALIASES = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "arctg": "arctan",
    "tg": "tan",
    "ctg": "cot",
    "cosec": "csc",
    "ceiling": "ceil",
    "sign": "sgn",
    "arcsinh": "arsinh",
    "arccosh": "arcosh",
    "arctanh": "artanh",
    "asinh": "arsinh",
    "acosh": "arcosh",
    "atanh": "artanh",
}
WORD_CONSTANTS = {
    "pi": "pi",
    "infty": "infinity",
    "infinity": "infinity",
    "inf": "infinity",
    "oo": "infinity",
}
OPERATORS = {
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "bullet": "*",
    "div": "/",
    "pm": "pm",
    "mp": "mp",
    "cup": "cup",
    "cap": "cap",
    "bigcup": "cup",
    "setminus": "setminus",
    "backslash": "setminus",
    "smallsetminus": "setminus",
    "choose": "choose",
    "over": "over",
    "bmod": "mod",
    "mod": "mod",
}
RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    "<=": "<=",
    ">=": ">=",
    "=<": "<=",
    "!=": "!=",
    "==": "=",
    "le": "<=",
    "leq": "<=",
    "leqslant": "<=",
    "leqq": "<=",
    "ge": ">=",
    "geq": ">=",
    "geqslant": ">=",
    "geqq": ">=",
    "lt": "<",
    "gt": ">",
    "ne": "!=",
    "neq": "!=",
    "approx": "approx",
    "simeq": "approx",
    "doteq": "approx",
    "coloneqq": "=",
    "in": "in",
    "equiv": "equiv",
    "cong": "equiv",
}
OPENERS = {
    "(": "(",
    "[": "[",
    "{": "{",
    "lbrace": "\\{",
    "\\{": "\\{",
    "langle": "<",
    "lfloor": "floor",
    "lceil": "ceil",
    "lbrack": "[",
    "lparen": "(",
}
CLOSERS = {
    ")": ")",
    "]": "]",
    "}": "}",
    "rbrace": "\\}",
    "\\}": "\\}",
    "rangle": ">",
    "rfloor": "floor",
    "rceil": "ceil",
    "rbrack": "]",
    "rparen": ")",
}
BARS = _words("| vert \\| Vert mid lvert rvert lVert rVert")
SPACES = _words(
    "\\, \\; \\: \\! \\> quad qquad displaystyle textstyle limits nolimits left right middle "
    "thinspace space phantom hfill"
) | {"\\ ", *(size + side for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r"))}
TEXTS = _words(
    "text mathrm textrm mbox operatorname textit textbf mathbf mathit mathsf mathtt "
    "textnormal textsf texttt boldsymbol bm rm bf it pmb hbox emph"
)
ACCENTS = _words(
    "vec hat bar overline tilde underline widehat widetilde dot ddot overrightarrow mathcal "
    "mathscr mathfrak overleftrightarrow"
)
PREFIXES = _words("angle triangle")
NAMED_SETS = frozenset("NZQRC")
FRACTIONS = frozenset(("frac", "dfrac", "tfrac", "cfrac"))
BINOMIALS = frozenset(("binom", "dbinom", "tbinom"))
EMPTY = frozenset(("emptyset", "varnothing"))

_SUPERSCRIPTS = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", range(10), strict=True)
)
_FRACTION_SIGNS = {
    "\u00bd": (1, 2),
    "\u00bc": (1, 4),
    "\u00be": (3, 4),
    "\u2153": (1, 3),
    "\u2154": (2, 3),
    "\u2155": (1, 5),
    "\u2156": (2, 5),
    "\u2157": (3, 5),
    "\u2158": (4, 5),
    "\u2159": (1, 6),
    "\u215a": (5, 6),
    "\u215b": (1, 8),
    "\u215c": (3, 8),
    "\u215d": (5, 8),
    "\u215e": (7, 8),
}
_GREEK_SIGNS = {
    **dict(
        zip(
            "\u03b1\u03b2\u03b3\u03b4\u03b5\u03b6\u03b7\u03b8",
            ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"],
            strict=True,
        )
    ),
    **dict(
        zip(
            "\u03ba\u03bb\u03bc\u03bd\u03be\u03c0\u03c1\u03c3\u03c4",
            ["kappa", "lambda", "mu", "nu", "xi", "pi", "rho", "sigma", "tau"],
            strict=True,
        )
    ),
    **dict(
        zip(
            "\u03c6\u03c7\u03c8\u03c9\u0394\u03a6\u03a8\u03a9\u0398",
            ["phi", "chi", "psi", "omega", "Delta", "Phi", "Psi", "Omega", "Theta"],
            strict=True,
        )
    ),
}
SIGNS = str.maketrans(
    {
        **dict.fromkeys(DASHES, "-"),
        **{sign: f"^{{{digit}}}" for sign, digit in _SUPERSCRIPTS.items()},
        **{chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)},
        **{sign: f"\\frac{{{top}}}{{{low}}}" for sign, (top, low) in _FRACTION_SIGNS.items()},
        **{sign: f"\\{name} " for sign, name in _GREEK_SIGNS.items()},
        "\u00d7": "\\times ",
        "\u2715": "\\times ",
        "\u00b7": "\\cdot ",
        "\u22c5": "\\cdot ",
        "\u2219": "\\cdot ",
        "\u2217": "*",
        "\u00f7": "/",
        "\u2044": "/",
        "\u2215": "/",
        "\u221e": "\\infty ",
        "\u2205": "\\emptyset ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2a7d": "\\le ",
        "\u2a7e": "\\ge ",
        "\u2260": "\\ne ",
        "\u2248": "\\approx ",
        "\u2261": "\\equiv ",
        "\u2208": "\\in ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2216": "\\setminus ",
        "\u00b1": "\\pm ",
        "\u2213": "\\mp ",
        "\u221a": "\\sqrt ",
        "\u221b": "\\cbrt ",
        "\u00b0": "^\\circ ",
        "\u211d": "\\mathbb{R}",
        "\u2124": "\\mathbb{Z}",
        "\u2115": "\\mathbb{N}",
        "\u211a": "\\mathbb{Q}",
        "\u2102": "\\mathbb{C}",
        "\u27e8": "\\langle ",
        "\u27e9": "\\rangle ",
        "\u230a": "\\lfloor ",
        "\u230b": "\\rfloor ",
        "\u2308": "\\lceil ",
        "\u2309": "\\rceil ",
        "\u2032": "'",
        "\u2033": "''",
        "\u2026": "\\ldots ",
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u200a\u2007\n\r\t", " "),
    }
)
"""Unicode for what LaTeX has a command for; applied before anything is looked for."""
