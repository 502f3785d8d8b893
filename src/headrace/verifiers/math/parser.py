r"""From tokens to an expression, a set, a point, a matrix or a relation.

A recursive descent without backtracking: linear in the text, and no deeper than `cursor` allows.
Owns: every token is read or the text is `Unreadable`. What two readers would read in two ways
(``2 3``, ``3 5/2``, ``\\frac123``, ``x2``) is unreadable, too.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

from headrace.verifiers.math import symbols
from headrace.verifiers.math.building import (
    applied,
    divided,
    each,
    in_degrees,
    is_plain_fraction,
    mixed,
    named_set,
    sum_of,
    times,
)
from headrace.verifiers.math.cursor import Cursor
from headrace.verifiers.math.lexer import Token, tokenize
from headrace.verifiers.math.literals import number_of
from headrace.verifiers.math.names import suffix
from headrace.verifiers.math.tree import (
    EMPTY_SET,
    TWO,
    Braces,
    Bracketed,
    Constant,
    Matrix,
    Number,
    Operation,
    Relation,
    SetOperation,
    Symbol,
    Tree,
    Unreadable,
    Value,
    tree_of,
    unreadable,
)

_OPAQUE = frozenset("fghFGH")
"""Letters that a bracket follows as an argument, and not as a factor."""
_INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot")}
_SET_OPERATIONS = {"cup": "union", "cap": "intersection", "setminus": "difference"}
_SIGNED = {"+": None, "-": "neg", "pm": "plus_minus", "mp": "minus_plus"}


def parse(text: str) -> Value:
    """Return what ``text`` says. Raises Unreadable, or Refused where it is nested too deep."""
    parser = _Parser(tokenize(text))
    value = parser.relation()
    parser.end()
    return value


class _Parser(Cursor):
    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._bar_closes = False
        """Whether a bar ends what is being read, and does not open an absolute value."""

    def end(self) -> None:
        """Raise Unreadable unless everything was read."""
        self.need("end")

    def relation(self) -> Value:
        """Read ``side (sign side)*``."""
        sides, signs = [self._set()], []
        while sign := self.take("relation"):
            signs.append(sign.text)
            sides.append(self._set())
        return Relation(tuple(sides), tuple(signs)) if signs else sides[0]

    def _set(self) -> Value:
        left = self._sum()
        while sign := self.take("operator", *_SET_OPERATIONS):
            self.chain()
            name = _SET_OPERATIONS[sign.text]
            left = SetOperation(name, left, self._sum())
        return left

    def _sum(self) -> Value:
        self.deeper()
        terms = [self._signed(self._product)]
        while self.at_a("operator", *_SIGNED):
            terms.append(self._signed(self._product))
        value = self._infix(terms[0] if len(terms) == 1 else sum_of(terms))
        self.nesting -= 1
        return value

    def _infix(self, left: Value) -> Value:
        r"""Read what TeX puts between all that stands before and behind: ``a \over b``."""
        sign = self.take("operator", "over", "choose")
        if sign is None:
            return left
        right = self._sum()
        if sign.text == "over":
            return divided(left, right)
        return Operation("binomial", (tree_of(left), tree_of(right)))

    def _signed(self, read: Callable[[], Value]) -> Value:
        """Read signs and what follows them; two minus signs are none."""
        names: list[str] = []
        while sign := self.take("operator", *_SIGNED):
            name = _SIGNED[sign.text]
            if name == "neg" and names[-1:] == ["neg"]:
                names.pop()
            elif name is not None:
                names.append(name)
                self.chain()
        value = read()
        for name in reversed(names):
            value = each(value, partial(_operation, name))
        return value

    def _product(self) -> Value:
        left = self._factor()
        while True:
            if sign := self.take("operator", "*", "/"):
                self.chain()
                right = self._signed(self._factor)
                left = times(left, right) if sign.text == "*" else divided(left, right)
            elif self.take("operator", "mod"):
                self.chain()
                left = Operation("mod", (tree_of(left), tree_of(self._factor())))
            elif self._begins_factor():
                left = times(left, self._factor())
            else:
                return left

    def _begins_factor(self) -> bool:
        """Whether what follows is multiplied without a sign; a number never is."""
        if self.at_a("number"):
            before = self.tokens[self.at - 1]
            if (before.kind, before.text) == ("operator", "!"):
                return True
            msg = "a number behind an expression, without a sign between them"
            raise Unreadable(msg)
        if self.at_a("bar"):
            return not self._bar_closes
        if self.at_a("command"):
            return self.token.text not in {"\\\\", "circ", "degree", "prime"}
        if self.at_a("environment"):
            return self.token.text.startswith("begin")
        return self.token.kind in {"letter", "constant", "function", "open"}

    def _factor(self) -> Value:
        """Read an atom with its factorials and its power."""
        value = self._atom()
        while True:
            if self.take("operator", "!"):
                if self.at_a("operator", "!"):
                    unreadable("a double factorial, or a factorial of one")
                value = Operation("factorial", (tree_of(value),))
            elif self.take("operator", "^"):
                value = self._power(tree_of(value))
            elif self.take("command", "degree"):
                value = in_degrees(tree_of(value))
            else:
                return value

    def _power(self, base: Tree) -> Tree:
        self.chain()
        if self.take("command", "circ"):
            return in_degrees(base)
        if self.at_a("open", "{") and self.tokens[self.at + 1].text == "circ":
            self.at += 2
            self.need("close", "}")
            return in_degrees(base)
        exponent = self._exponent()
        if self.take("operator", "^"):
            exponent = self._power(exponent)
        return Operation("pow", (base, exponent))

    def _exponent(self) -> Tree:
        """Read what stands behind ``^``: a group, or a single number, letter or command."""
        sign = self.take("operator", "-", "+")
        value = tree_of(self._single())
        return Operation("neg", (value,)) if sign and sign.text == "-" else value

    def _single(self) -> Value:
        if token := self.take("number"):
            return number_of(token.text)
        if self.at_a("letter") or self.at_a("constant"):
            return self._name()
        return self._atom()

    def _atom(self) -> Value:
        self.deeper()
        value = self._atom_of(self.token)
        self.nesting -= 1
        return value

    def _atom_of(self, token: Token) -> Value:  # noqa: PLR0911 - one for each kind of token
        match token.kind:
            case "number":
                return self._number()
            case "letter" | "constant":
                return self._name()
            case "function":
                return self._function()
            case "open":
                return self._opened()
            case "bar":
                return Operation("abs", (self._until_bar(),))
            case "command":
                return self._command()
            case "environment":
                return self._matrix()
            case _:
                msg = f"{token.text or 'the end'!r} where a number or letter belongs"
                raise Unreadable(msg)

    def _number(self) -> Tree:
        """Read a number; behind a whole one, a proper fraction makes it a mixed number."""
        token = self.need("number")
        number = number_of(token.text)
        if self.at_a("number"):
            return self._mixed_in_line(number)
        if self.at_a("command", *symbols.FRACTIONS):
            fraction = self._command()
            if is_plain_fraction(fraction):
                return mixed(number, fraction)
            return tree_of(times(number, fraction))
        if self.at_a("operator", "_"):
            unreadable("a subscript of a number inside an expression")
        return number

    def _mixed_in_line(self, whole: Number) -> Tree:
        """Read the ``1/2`` of ``3 1/2``."""
        top = number_of(self.need("number").text)
        if not self.take("operator", "/") or not self.at_a("number"):
            unreadable("two numbers side by side")
        low = number_of(self.need("number").text)
        return mixed(whole, Operation("div", (top, low)))

    def _name(self) -> Value:
        token = self.take("letter") or self.need("constant")
        if token.text.startswith("mathbb "):
            return named_set(token.text)
        name = token.text + suffix(self)
        if token.kind == "constant" and name == token.text:
            return Constant(name)
        if self.at_a("open", "("):
            if name.rstrip("'") in _OPAQUE:
                return Operation("call", (Symbol(name), *self._arguments()))
            if name == "Gamma":
                # Gamma(x) is (x - 1)!.
                below = Operation("add", (*self._arguments(), Number(Fraction(-1))))
                return Operation("factorial", (below,))
            if name == "C" and (pair := self._pair()):
                return Operation("binomial", pair)
        return Symbol(name)

    def _pair(self) -> tuple[Tree, Tree] | None:
        """Read the brackets of ``C(5, 2)``; None, and nothing read, where they hold one thing."""
        start = self.at
        arguments = self._arguments()
        if len(arguments) == 2:  # noqa: PLR2004 - a pair
            return arguments[0], arguments[1]
        self.at = start
        return None

    def _function(self) -> Tree:
        name = self.need("function").text
        if name in {"sqrt", "cbrt"}:
            return self._root(name)
        base = self._log_base() if name == "log" else None
        power = self._exponent() if self.take("operator", "^") else None
        if name in _INVERSES and power == Operation("neg", (Number(Fraction(1)),)):
            name, power = _INVERSES[name], None
        if base is None and name == "log" and self.at_a("operator", "_"):
            base = self._log_base()
        value = applied(name, base, self._function_arguments())
        return value if power is None else Operation("pow", (value, power))

    def _log_base(self) -> Tree | None:
        if not self.take("operator", "_"):
            return None
        if self.at_a("number") and len(self.token.text) > 1 and self.token.text.isdigit():
            # In TeX "\\log_28" is the logarithm of 8 to the base 2.
            digits = self.need("number").text
            self.at -= 1
            self.tokens[self.at] = Token("number", digits[1:])
            return number_of(digits[0])
        return tree_of(self._single())

    def _root(self, name: str) -> Tree:
        degree: Tree = Number(Fraction(3)) if name == "cbrt" else TWO
        if name == "sqrt" and self.take("open", "["):
            degree = tree_of(self._sum())
            self.need("close", "]")
        return Operation("root", (tree_of(self._single()), degree))

    def _function_arguments(self) -> tuple[Tree, ...]:
        r"""Read arguments in brackets, or the product that follows without any: ``\sin 2x``."""
        if self.at_a("open", "(", "[", "{"):
            return self._arguments()
        value = self._signed(self._factor)
        while (self.at_a("letter") or self.at_a("constant") or self.at_a("command")) and (
            self._begins_factor()
        ):
            value = times(value, self._factor())
        return (tree_of(value),)

    def _arguments(self) -> tuple[Tree, ...]:
        opener = self.need("open").text
        items = [tree_of(self._inside(self._sum))]
        while self.take("separator", ",", ";"):
            items.append(tree_of(self._inside(self._sum)))
        self.need("close", {"(": ")", "[": "]", "{": "}"}[opener])
        return tuple(items)

    def _inside(self, read: Callable[[], Value]) -> Value:
        """Read something inside brackets, where a bar opens an absolute value again."""
        outside, self._bar_closes = self._bar_closes, False
        value = read()
        self._bar_closes = outside
        return value

    def _until_bar(self) -> Tree:
        self.need("bar")
        outside, self._bar_closes = self._bar_closes, True
        value = tree_of(self._sum())
        self.need("bar")
        self._bar_closes = outside
        return value

    def _opened(self) -> Value:
        opener = self.need("open").text
        if opener in {"floor", "ceil"}:
            value = Operation(opener, (tree_of(self._inside(self._sum)),))
            self.need("close", opener)
            return value
        if opener in {"\\{", "{"}:
            return self._braced("\\}" if opener == "\\{" else "}")
        return self._bracketed(opener)

    def _bracketed(self, opener: str) -> Value:
        items = self._items()
        closer = self.need("close", ")", "]", ">").text
        pairs = {("(", ")"), ("[", "]"), ("<", ">")}
        if len(items) == 1 and (opener, closer) in pairs and opener != "<":
            return items[0]
        is_half_open = "<" not in (opener, closer) and ">" not in (opener, closer)
        if (opener, closer) not in pairs and not (is_half_open and len(items) == 2):  # noqa: PLR2004 - an interval
            unreadable(f"{opener!r} closed by {closer!r}")
        return Bracketed(opener, tuple(items), closer)

    def _items(self) -> list[Value]:
        items = [self._inside(self.relation)]
        while self.take("separator", ",", ";"):
            items.append(self._inside(self.relation))
        return items

    def _braced(self, closer: str) -> Value:
        """Read a group, a set by its elements, or a set by its condition."""
        if self.take("close", closer):
            return EMPTY_SET
        outside, self._bar_closes = self._bar_closes, closer == "\\}"
        first = self.relation()
        if closer == "\\}" and (self.take("bar") or self.take("separator", ":")):
            first = self._condition()
            self.need("close", closer)
            self._bar_closes = outside
            return first
        items = [first]
        while self.take("separator", ",", ";"):
            items.append(self.relation())
        self.need("close", closer)
        self._bar_closes = outside
        if closer == "}" and len(items) == 1:
            return items[0]
        return Braces(tuple(items))

    def _condition(self) -> Value:
        condition = self._inside(self.relation)
        if not isinstance(condition, Relation):
            unreadable("a set whose condition is no relation")
        return condition

    def _command(self) -> Value:
        name = self.need("command").text
        if name in symbols.FRACTIONS:
            top, low = self._two_arguments()
            return divided(top, low)
        if name in symbols.BINOMIALS:
            top, low = self._two_arguments()
            return Operation("binomial", (tree_of(top), tree_of(low)))
        if name in symbols.EMPTY:
            return EMPTY_SET
        msg = f"\\{name} where a number or letter belongs"
        raise Unreadable(msg)

    def _two_arguments(self) -> tuple[Value, Value]:
        r"""Read what follows ``\\frac``: of digits without braces, one each."""
        token = self.take("number")
        if token is None:
            return self._single(), self._argument_digit()
        digits = token.text
        if len(digits) == 2 and digits.isdigit() and not self.at_a("number"):  # noqa: PLR2004 - one each
            return number_of(digits[0]), number_of(digits[1])
        if len(digits) != 1:
            unreadable("a fraction of digits that can be split in two ways")
        return number_of(digits), self._argument_digit()

    def _argument_digit(self) -> Value:
        if self.at_a("number") and len(self.token.text) > 1:
            unreadable("a fraction of digits that can be split in two ways")
        return self._single()

    def _matrix(self) -> Value:
        kind = self.need("environment").text.removeprefix("begin ")
        if kind == "vmatrix" or kind.startswith("end"):
            unreadable(f"the environment {kind}")
        rows: list[tuple[Value, ...]] = []
        row: list[Value] = [self._inside(self._sum)]
        while not self.take("environment", f"end {kind}"):
            if self.take("separator", "&"):
                row.append(self._inside(self._sum))
                continue
            self.need("command", "\\\\")
            rows.append(tuple(row))
            row = []
            if not self.at_a("environment"):
                row.append(self._inside(self._sum))
        rows += [tuple(row)] if row else []
        if len({len(found) for found in rows}) != 1:
            unreadable("a matrix whose rows differ in length")
        return Matrix(tuple(rows))


def _operation(name: str, operand: Tree) -> Tree:
    return Operation(name, (operand,))
