r"""How models write answers: pairs that say the same, and pairs that do not, by kind of answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest

from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.deciding import ExactDecider, NeedsAlgebra
from headrace.verifiers.math.judging import Judgement, judge

Pair = tuple[str, str]

SAME = {
    "integers": [
        ("11111111100", r"11,\! 111,\! 111,\! 100"), ("14916", "14 {, }916"),
        ("32349", r"32{,}349"),
        ("5", "5"), ("5", "5."), ("5", "+5"), ("-5", "\u22125"), ("-5", "- 5"), ("5", "05"),
        ("5", "5.0"), ("5", "5.000"), ("1000", "1,000"), ("1234567", "1,234,567"),
        ("1234567", "1{,}234{,}567"), ("12000", "12 000"), ("12000", r"12\,000"),
        ("12000", r"12,\!000"), ("1234.5", "1,234.5"), ("0", "-0"), ("0", "0.00"), ("8", "2^3"),
        ("8", "2**3"), ("6", "3!"), ("120", "5!"), ("10", r"\binom{5}{2}"), ("10", r"\dbinom52"),
        ("10", r"{5 \choose 2}"), ("10", "C(5,2)"), ("24", r"4 \cdot 3 \cdot 2"), ("7", "|-7|"),
        ("7", r"\left|-7\right|"), ("7", r"\lvert -7 \rvert"), ("3", r"\lfloor 3.7 \rfloor"),
        ("4", r"\lceil 3.2 \rceil"), ("6", r"\gcd(12, 18)"), ("36", r"\operatorname{lcm}(12,18)"),
        ("9", r"\max(3, 9, 4)"), ("2", r"17 \bmod 5"), ("5", "\uff15"), ("100", "10²"),
        ("479001600", "12!"), ("5", r"\mathbf{5}"), ("5", "{5}"), ("5", "(5)"), ("5", "[5]"),
    ],
    "fractions": [
        ("1/2", r"\frac{1}{2}"), ("1/2", r"\dfrac{1}{2}"), ("1/2", r"\tfrac12"),
        ("1/2", r"\cfrac{1}{2}"), ("1/2", r"\frac12"), ("1/2", r"\frac 12"), ("1/2", "0.5"),
        ("1/2", ".5"), ("1/2", "2/4"), ("1/2", "1 / 2"), ("1/2", "½"), ("1/2", "1÷2"),
        ("1/2", r"\left(\frac{1}{2}\right)"), ("-1/2", r"-\frac{1}{2}"), ("-1/2", r"\frac{-1}{2}"),
        ("-1/2", r"\frac{1}{-2}"), ("3/4", r"\frac{3}{4}"), ("3/4", "¾"), ("22/7", r"\frac{22}7"),
        ("22/7", r"\frac{22}{7}"), ("7/3", r"2\frac{1}{3}"), ("7/3", "2 1/3"), ("-7/3", "-2 1/3"),
        ("-7/3", r"-2\frac13"), ("7/3", r"2\dfrac{1}{3}"), ("7/2", "3½"),
        ("5/3", r"1 \frac{2}{3}"), ("1/3", r"0.\overline{3}"), ("1/3", r"0.\bar{3}"),
        ("1/3", "0.(3)"), ("1/6", "0.1(6)"), ("1/7", r"0.\overline{142857}"),
        ("7/22", r"0.3\overline{18}"), ("1", r"0.\overline{9}"), ("1000/3", r"\frac{1,000}{3}"),
        ("3/2", r"\frac{3/4}{1/2}"), ("1/8", "2^{-3}"), ("1/6", r"\frac{1}{2}-\frac{1}{3}"),
        ("2/3", "(2)/(3)"), ("1/1024", "2^{-10}"),
    ],
    "scientific notation": [
        ("3", "3e0"), ("30000", "3e4"), ("30000", "3E4"), ("30000", "3e+4"), ("0.0003", "3e-4"),
        ("30000", r"3 \times 10^4"), ("30000", r"3 \cdot 10^{4}"), ("30000", "3\u00d710⁴"),
        ("30000", "3*10^4"), ("30000", r"3\times 10^4"), ("0.00052", r"5.2\times10^{-4}"),
        ("6.02e23", r"6.02 \times 10^{23}"), ("1e400", "10^{400}"), ("1500", "1.5e3"),
    ],
    "percent": [
        ("28%", "28 pct"), ("28%", "28 percentage"),
        ("50%", r"50\%"), ("50%", "50 %"), ("50%", "50 percent"), ("50%", "50"),
        ("50%", r"50\text{ percent}"), ("12.5%", r"12\frac{1}{2}\%"),
        (r"33\frac13\%", r"\frac{100}{3}\%"),
    ],
    "roots": [
        (r"\sqrt{2}", r"\sqrt2"), (r"\sqrt{2}", "√2"), (r"\sqrt{2}", "sqrt(2)"),
        (r"\sqrt{2}", "√(2)"), (r"\sqrt{2}", "2^{1/2}"), (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"),
        (r"\sqrt{12}", r"2\sqrt{3}"), (r"2\sqrt{3}", r"2\cdot\sqrt{3}"),
        (r"2\sqrt{3}", r"\sqrt{3}\cdot 2"), (r"2\sqrt{3}", "2*sqrt(3)"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"\frac{1+\sqrt5}{2}", r"\frac{\sqrt{5}+1}{2}"),
        (r"\frac{1+\sqrt{5}}{2}", r"\frac12+\frac{\sqrt5}{2}"), (r"\sqrt[3]{2}", "2^{1/3}"),
        (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"), (r"\sqrt[3]{-8}", "-2"), ("2", r"\sqrt{4}"),
        ("2", r"\sqrt[3]{8}"), ("2", "8^{1/3}"), ("-2", "(-8)^{1/3}"), ("4", "8^{2/3}"),
        (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"), (r"\sqrt{6}", r"\sqrt{2}\sqrt{3}"),
        ("0", r"\sqrt{2}\sqrt{2}-2"), (r"\sqrt[4]{4}", r"\sqrt{2}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"\frac{\sqrt2}2", r"\sqrt{\frac12}"),
        (r"\sqrt{\frac{3}{4}}", r"\frac{\sqrt3}{2}"), (r"\sqrt[3]{7+5\sqrt2}", r"1+\sqrt{2}"),
    ],
    "constants": [
        (r"\pi", "π"), (r"\pi", "pi"), (r"2\pi", "2π"), (r"2\pi", r"\pi \cdot 2"),
        (r"2\pi", "2pi"), (r"\frac{\pi}{2}", r"\pi/2"), (r"\frac{\pi}{2}", r"0.5\pi"),
        (r"\frac{3\pi}{4}", r"\frac34\pi"), (r"\pi^2", r"\pi\cdot\pi"), ("e", r"\mathrm{e}"),
        ("e", r"\exp(1)"), ("e^2", r"\exp(2)"), (r"1-\frac{1}{e}", "1-e^{-1}"),
        (r"\frac{\pi}{6}", r"\arcsin\frac12"), (r"\frac{\pi}{4}", r"\arctan 1"),
        (r"\frac{\pi}{4}", r"\tan^{-1}(1)"), (r"16\pi", "π(4)^2"),
    ],
    "logarithms": [
        ("3", r"\log_2 8"), ("3", r"\log_{2}(8)"), ("2", r"\log_{10} 100"), ("2", r"\lg 100"),
        ("1", r"\ln e"), (r"\ln 2", r"\log 2"), (r"2\ln 3", r"\ln 9"),
        (r"\ln\frac{3}{2}", r"\ln 3-\ln 2"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
        (r"\log_2 3", r"\frac{\log 3}{\log 2}"), (r"\ln(2)", "ln 2"),
        (r"\log_3 10", r"1/\log_{10} 3"), (r"\frac{1}{2}\ln 2", r"\ln\sqrt2"),
    ],
    "trigonometry": [
        ("1/2", r"\sin 30^\circ"), ("1/2", r"\sin\frac{\pi}{6}"),
        (r"\frac{\sqrt{3}}{2}", r"\cos 30^\circ"), (r"\frac{\sqrt3}{2}", r"\sin(60°)"),
        ("1", r"\tan 45^\circ"), ("-1", r"\cos\pi"), ("0", r"\sin(\pi)"),
        (r"\sin 2x", r"2\sin x\cos x"), (r"\sin 2x", r"\sin(2x)"), ("1", r"\sin^2 x+\cos^2 x"),
        (r"\sin^2 x", r"(\sin x)^2"), (r"\tan x", r"\frac{\sin x}{\cos x}"),
        (r"\sec x", r"\frac1{\cos x}"), (r"\cos 2x", r"1-2\sin^2 x"),
        (r"\frac{\sqrt{5}-1}{4}", r"\sin 18^\circ"),
        (r"\frac{\sqrt6-\sqrt2}{4}", r"\sin\frac{\pi}{12}"), (r"\cosh x", r"\frac{e^x+e^{-x}}{2}"),
    ],
    "complex numbers": [
        ("3+4i", "4i+3"), ("i", r"\sqrt{-1}"), ("2i", r"\sqrt{-4}"), ("-1", "i^2"), ("-i", "i^3"),
        ("-1", r"e^{i\pi}"), (r"\frac{1+i}{2}", r"\frac{1}{1-i}"), ("5", "|3+4i|"),
        ("2i", "(1+i)^2"), ("1+i", r"1+\mathrm{i}"),
        (r"\frac{1}{2}+\frac{\sqrt3}{2}i", r"e^{i\pi/3}"), ("3 - 2i", "3-2i"),
        (r"1-\sqrt{3}i", r"1-i\sqrt3"),
    ],
    "expressions": [
        ("(-1)^n", r"\cos(n\pi)"), ("1", "(-1)^{2n}"), ("(-1)^{n+1}x", "-(-1)^n x"),
        ("x^2-1", "(x-1)(x+1)"), ("x^2+2x+1", "(x+1)^2"), ("2x+4", "2(x+2)"), ("xy", "yx"),
        ("ab", "b a"), ("x", "x^1"), (r"\frac{x}{2}", "0.5x"), (r"\frac{x}{2}", "x/2"),
        (r"\frac{x+1}{2}", r"\frac12 x+\frac12"), ("x^{-1}", r"\frac1x"),
        (r"\frac{1}{x+1}-\frac{1}{x+2}", r"\frac{1}{(x+1)(x+2)}"),
        (r"\sqrt{1/n}", r"\frac{1}{\sqrt n}"), ("x_1+x_2", "x_2+x_1"),
        ("n(n+1)/2", r"\frac{n^2+n}{2}"), ("2^{n+1}", r"2\cdot2^n"), ("4^n", "2^{2n}"),
        (r"\frac{n!}{(n-1)!}", "n"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), ("e^{2x}", "(e^x)^2"),
        ("e^{80x}", "(e^x)^{80}"), ("e^{130x}", "(e^x)^{130}"),
        ("e^{x+y}", "e^x e^y"), ("|x|", r"\sqrt{x^2}"), ("a^2-b^2", "(a+b)(a-b)"),
        ("3x^2y", "3yx^2"), (r"\alpha+\beta", r"\beta+\alpha"), ("-x+5", "5-x"),
        ("(x+1)(x-1)", "x²-1"), (r"\frac{x^2-1}{x-1}", "x+1"), ("(a-b)^3", "a^3-3a^2b+3ab^2-b^3"),
        (r"\ln(x^2)", r"2\ln|x|"), ("2^{10}x", "1024x"), ("f(x)+1", "1+f(x)"),
        ("x^2 + C", "C + x^2"), (r"\vec{v}", r"\vec v"), ("x^{2/3}", r"\sqrt[3]{x^2}"),
        ("4xy", r"4 \cdot x \cdot y"),
    ],
    "equations": [
        ("5", "x = 5"), ("x=5", "5"), ("x=5", "5=x"), ("y=2x+1", "y = 1+2x"),
        ("y=2x+1", "2x-y+1=0"), ("y=2x+1", "f(x)=2x+1"), ("2x+1=0", "4x+2=0"), ("x+y=3", "y=3-x"),
        (r"\frac{x}{2}+\frac{y}{3}=1", "3x+2y=6"), ("x^2+y^2=25", "25=x^2+y^2"),
        ("12", r"3 \cdot 4 = 12"), ("3.14", r"x \approx 3.14"), ("x=2, y=3", "y=3, x=2"),
        ("x=1", "X=1"), ("5", "2+3=5"), ("a=3,b=4", r"a=3 \text{ and } b=4"),
        ("(x,y)=(1,2)", "(1,2)"), ("f(x)=x^2", "x^2"),
    ],
    "lists and sets": [
        (r"\{1\pm\sqrt5,-2\}", r"\{-2,1-\sqrt5,1+\sqrt5\}"),
        ("f(2) < f(1) < f(4)", "f(2)<f(1)<f(4)"),
        ("1,2", "2,1"), ("1, 2", r"\{1,2\}"), (r"\{1,2,3\}", r"\{3, 2, 1\}"), ("1,2", "1 and 2"),
        ("1,2", r"2 \text{ or } 1"), ("1,2", "x=1 or x=2"), ("1,2", "x=1, x=2"),
        ("1, 2, and 3", "1,2,3"), (r"\pm 3", "3,-3"), (r"\pm3", r"\pm 3"), ("3,-3", "x=±3"),
        (r"2\pm\sqrt3", r"2+\sqrt{3},\ 2-\sqrt{3}"),
        (r"\frac{-1\pm\sqrt5}{2}", r"\frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2}"),
        (r"\emptyset", r"\{\}"), (r"\emptyset", r"\varnothing"), (r"\emptyset", "∅"),
        (r"\emptyset", "no solution"), (r"\{1\}", r"\{1.0\}"), (r"\{a,b\}", r"\{b, a\}"),
        (r"x\in\{1,2\}", r"\{1,2\}"), (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"),
        ("(1,2),(3,4)", "(3,4), (1,2)"), ("1;2", "2;1"), (r"\left\{1,2\right\}", r"\{2,1\}"),
    ],
    "intervals": [
        ("(1,2)", "1<x<2"), ("[1,2]", r"1\le x\le2"), ("[1,2)", "1 ≤ x < 2"),
        (r"(1,\infty)", "x>1"), (r"[2,\infty)", r"x\ge 2"), (r"[2,\infty)", "2 ≤ x"),
        (r"(-\infty,3]", r"x \leq 3"), (r"(-\infty,\infty)", r"\mathbb{R}"),
        (r"\mathbb{R}", "all real numbers"), ("(0,1)", r"x\in(0,1)"),
        (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2"),
        (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"), ("[1,3]", r"[1,2]\cup[2,3]"),
        ("[1,3]", r"[1,2)\cup[2,3]"), (r"\mathbb{R}\setminus\{3\}", r"(-\infty,3)\cup(3,\infty)"),
        (r"x\ne3", r"(-\infty,3)\cup(3,\infty)"), (r"\left(0,\frac{1}{2}\right]", "(0, 0.5]"),
        (r"\left[-\sqrt2,\sqrt2\right]", r"-\sqrt{2} \le x \le \sqrt{2}"), ("(1,2)", "]1,2["),
        (r"(0,+\infty)", "x>0"), ("x>2", "2<x"), ("x>2", "2x>4"), ("x>2", "-x<-2"),
        ("1<x<2", "x>1 and x<2"), (r"\{x \mid x>2\}", r"(2,\infty)"), (r"\{x: x>2\}", "x>2"),
        (r"(1,2)\cup\{3\}", r"\{3\}\cup(1,2)"), (r"[0,2]\cap[1,3]", "[1,2]"),
        ("x<1,x>2", r"(-\infty,1)\cup(2,\infty)"),
    ],
    "points and vectors": [
        ("(1,2)", "( 1 , 2 )"), ("(1,2)", r"\left(1,2\right)"), (r"(\frac12,3)", "(0.5,3)"),
        ("(1,2,3)", r"\langle 1,2,3\rangle"), ("(1,2)", r"\langle1,2\rangle"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), ("(x,y)=(3,4)", "(3,4)"),
        (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"), ("(1,(2,3))", "(1,(2,3))"),
        ("(-1,0)", "(\u22121,0)"), ("(1, 2, 3, 4)", "(1,2,3,4)"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}"),
        (r"\begin{pmatrix}0.5\\1\end{pmatrix}", r"\begin{pmatrix}\frac12\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\\\end{pmatrix}"),
        (r"\frac12\begin{pmatrix}2&4\\6&8\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix}a+b\\c\end{pmatrix}", r"\begin{pmatrix}b+a\\c\end{pmatrix}"),
        (r"\begin{pmatrix}-1&0\\0&-1\end{pmatrix}", r"-\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\left[\begin{array}{cc}1&2\end{array}\right]"),
    ],
    "units": [
        ("5 cm", r"5\text{ cm}"), ("5 cm", r"5\,\text{cm}"), ("5 cm", "5cm"),
        ("5 cm", r"5\mathrm{~cm}"), ("5 cm", "5 centimeters"), ("5 cm", r"5 \text{ centimetres}"),
        ("5 cm", r"\text{5 cm}"), ("5 m", "5 meters"), ("25 cm^2", r"25\text{ cm}^2"),
        ("25 cm^2", r"25\ \mathrm{cm}^{2}"), ("25 cm^2", "25 square centimeters"),
        ("9.8 m/s^2", r"9.8\,\mathrm{m/s^2}"), ("60 km/h", "60 kilometers per hour"),
        ("60 mph", "60 miles per hour"), (r"\$5", "$5"), (r"\$5", "5 dollars"),
        (r"\$1,234.50", "1234.50 dollars"), (r"30^\circ", "30 degrees"), (r"30^\circ", "30°"),
        (r"30^{\circ}", r"30\degree"), ("5 apples", "5 Apple"), ("3 hours", "3 h"),
        ("x = 5 cm", "5 cm"), (r"5\sqrt{2} cm", r"5\sqrt{2}\text{ cm}"),
        (r"16\pi \text{ cm}^2", r"16\pi cm^2"), ("101_2", "101_{2}"), ("1A3_{16}", "1A3_{16}"),
        ("20 minutes", "20 min"), ("7 days", "7 day"),
    ],
    "choices": [
        ("B", "(B)"), ("B", "B."), ("B", "B)"), ("B", r"\text{B}"), ("B", r"\textbf{(B)}"),
        ("B", r"\mathrm{B}"), (r"\text{(B)}", "B"),
    ],
    "words": [
        ("Tuesday", "tuesday"), (r"\text{Tuesday}", "Tuesday"), ("yes", r"\text{Yes}"),
        ("odd", r"\text{odd}."), (r"\text{no solution}", "No solution"),
        ("New York", r"\text{new york}"), ("true", "True"), ("12:30", "12 : 30"),
        ("3:2", r"3\colon 2"),
    ],
}  # fmt: skip

ONLY_AS_AN_ANSWER = {
    "more or less than is asked": [
        (r"\frac{2}{3}", r"\frac{2}{3}\approx 0.667"), (r"\pi", r"x=\pi\approx3.14"),
        ("0.667", r"x \approx 0.667"), ("5", "approximately 5"), ("5", r"about $5$"),
        ("B", r"\textbf{(B) } 12"), ("B", "(B) 12"), ("B", "B. 12"), ("B", "B) because"),
        ("5", "5 cm"), ("5", "5 apples"), ("5", r"\$5"), ("101_2", "101"), ("9.8 m/s^2", "9.8"),
        ("30", r"30^\circ"), ("5 cm", "5"), (r"\$5", "5"), ("1A3_{16}", "1A3_{16}"),
        ("1/2", "50/100"), ("8", "x=2^3=8"), ("1,2", "$x=1$ or $x=2$"), ("5", "$5$"),
        ("5", r"\(5\)"), ("5", r"\[5\]"), ("5", "`5`"), ("5", "$$5$$"), ("5", r"\boxed{5}"),
        (r"\frac{1}{2}", r"\displaystyle\frac{1}{2}"), (r"x=\frac12", r"\text{x}=\frac12"),
    ],
}  # fmt: skip

DIFFERENT = {
    "numbers": [
        ("32349", "32, 349"), ("204_5", "205_5"),
        ("0.667", r"\frac{2}{3}\approx 0.667"), ("3.14", r"\pi\approx3.14"), ("5", r"4\approx5"),
        ("5", "-5"), ("5", "6"), ("5", "5.1"), ("5", "50"), ("1000", "1,00"), ("1/2", "2"),
        ("1/2", "1/3"), ("7/2", "3/2"), ("1/3", "0.333333"), ("1/3", "0.3"), ("1/2", r"1\frac12"),
        ("5", "55"), ("5", "5 5"), ("10", "1 0"), ("12", "1,2"), ("5", "5/0"),
        ("1/2^{99}", "1/2^{98}"), ("1/2004!", "1/2006!"), ("0", "1/2^{300}"),
        ("2^{1000}", "2^{1000}+1"), ("5", "4.999999999999999999999999999999999"),
        ("1", r"0.\overline{8}"), ("3", "3e1"), ("3", "3e-1"), ("0.3", "0.3..."), ("8", "3^2"),
        ("-9", "(-3)^2"), ("9", "-3^2"), ("6", "3"), ("120", "5"), ("50%", "0.5"), ("50%", "500%"),
        ("5", ""), ("5", "?"), ("5", "five or six"), ("0", r"\emptyset"), ("1", "i"), ("5", "5!"),
        ("5", "x"), ("5", "5x"), ("0.5", "1/5"), ("3", r"\pm 3"), ("3", "3 or 4"),
        ("3", r"\{3,4\}"),
    ],
    "constants": [
        ("0", "e^{-e^{10000}}"), ("1", r"1+e^{-9999\pi/4}"), ("1", "1+e^{-9999}"),
        ("0", "e^{-9999}"),
        ("1", "1+e^{-99x}"), ("1", r"1+2^{-999\sqrt2}"), ("e^{e^9}", "e^{e^9}+1"),
        (r"\pi", "3.14"), (r"\pi", "3.14159265358979323846264338327950288"), (r"\pi", "22/7"),
        ("e", "2.718281828"), (r"\sqrt2", "1.41421356"), (r"\pi", r"\pi+10^{-40}"),
        (r"\sqrt{2}", r"\sqrt{2}+10^{-300}"), ("4", r"4\sqrt(2)"), (r"1-\frac1e", r"1+\frac1e"),
        (r"\pi", r"\Pi"), (r"2\pi", r"\pi"), ("e", "E"), (r"\sqrt{2}", r"\sqrt{3}"),
        (r"\sqrt[3]{2}", r"3\sqrt{2}"), (r"\sqrt{3}", "3"), (r"\ln 2", r"\log_2 2"),
        (r"\log_2 3", r"\log_3 2"), ("3", r"\log_28 8"), (r"\sin 30^\circ", r"\sin 30"),
        ("1+2i", "1-2i"), ("i", "-i"), ("i", "I"), ("2i", "2"), ("3+4i", "4+3i"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"), ("0", r"\sin(10^{-50})"),
        (r"\frac{\pi}{2}", r"\frac{2}{\pi}"),
    ],
    "expressions": [
        ("(-1)^n", "(-1)^{n+1}"), ("(-1)^n x", r"(-1)^n x+\sin(\pi x)"), ("(-1)^n", "-1"),
        ("x", "y"), ("x", "X"), ("x", "-x"), ("x", "x+10^{-60}"), ("x", "2x"), ("x^2", "x^3"),
        ("x^2-1", "(x-1)(x+2)"), ("x^2-1", "x^2+1"), (r"\sqrt{x^2}", "x"), (r"\sqrt{x^2}", "-x"),
        (r"\sqrt{x^2y^2}", "xy"), (r"\frac{x}{y}", r"\frac{y}{x}"), (r"\frac{R}{r}", "1"),
        ("ab", "a+b"), ("x_1", "x_2"), ("x_1", "x"), ("f(x)", "f'(x)"), ("f(2x)", "2f(x)"),
        ("4xy", "4"), ("2abcd", "2"), ("4 xy", "4"), ("2ab", "2"), ("4x", "4"), ("3 m", "3 n"),
        ("2^n", "n^2"), ("n!", "n"),
        (r"\binom{n}{2}", r"\binom{n}{3}"), (r"\ln(x^2)", r"2\ln(x^3)"), ("e^{2x}", "e^{x^2}"),
        (r"\sin x", r"\sin(-x)"), (r"\sin 2x", r"2\sin x"), ("(-1)^n", "1"), ("x+1", "x"),
        ("a^2", "aA"), (r"\theta", r"\Theta"), ("x^2+C", "x^2"), ("x", "x+(x-1)(x-2)(x-3)"),
        ("(a+b)^2", "a^2+b^2"), ("|x|", "x"), (r"\lfloor x\rfloor", "x"),
    ],
    "equations": [
        ("y=2x+1", "y=2x-1"), ("y=2x+1", "x=2y+1"), ("x=5", "y=5"), ("x=5", "x=6"), ("5", "2=5"),
        ("5", "x=6=5"), ("x+y=3", "3"), ("x+y=3", "x-y=3"), ("0", "2x+1=0"), ("2x+1=0", "3x+1=0"),
        ("x=2, y=3", "x=3, y=2"), ("x=2,y=3", "x=2"), ("x^2+y^2=25", "x^2+y^2=5"), ("x=x", "y=1"),
        ("y=5", "5=x"), ("x>2", "x=2"), ("5", "x>5"), ("x=5", r"x\ne5"),
    ],
    "lists and sets": [
        ("1,2", "1"), ("1,2", "1,2,3"), ("1,2", "1,3"), ("1,2", "1,1"), ("1", "1,2"),
        (r"\{1,2\}", r"\{1,2,3\}"), (r"\{1,2\}", "(1,2)"), ("(1,2)", r"\{1,2\}"),
        ("1,2", r"\pm 1"), (r"\pm3", "3"), ("B", "A or B or C"), ("1,2", "12"),
        (r"\{\}", r"\{0\}"), ("1,2,3", "6"), (r"2\pm\sqrt3", r"2+\sqrt3"),
        ("(1,2),(3,4)", "(1,3),(2,4)"), ("1,2", "1 2"),
    ],
    "intervals and points": [
        ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"), ("(1,2)", r"1\le x<2"),
        (r"(1,\infty)", "x<1"), (r"[2,\infty)", "x>2"), ("(1,2)", "(1,3)"), ("(1,2)", "1,2"),
        (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)"), (r"(-\infty,1)\cup(2,\infty)", "(1,2)"),
        ("[1,3]", r"[1,2)\cup(2,3]"), (r"\mathbb{R}", r"\mathbb{Z}"),
        (r"\mathbb{R}\setminus\{3\}", r"\mathbb{R}"), ("x>2", "y>2"), ("x>2", "x<2"),
        ("x>2", r"x\ge2"), ("x>2", "-x>-2"), ("(1,2,3)", "(1,2)"), ("(1,2,3)", "(3,2,1)"),
        ("(1,2)", "3/2"), (r"x\ne 3", "x=3"), ("1<x<2", "x>1 or x<2"),
        (r"(0,\pi)", "(0,3.14159265)"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "1,2,3,4"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{vmatrix}1\\2\end{vmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{1,2\}"),
    ],
    "units": [
        ("5 cm", "5 m"), ("5 cm", "5 cm^2"), ("5 cm", "50 mm"), ("5 MW", "5 mW"), ("5 m", "5 ms"),
        ("9.8 m/s^2", "9.8 m/s"), ("9.8 m/s^2", "9.8 s/m^2"), (r"\$5", "5 cents"), (r"\$5", "€5"),
        ("5 kg", "5 g"), (r"30^\circ", r"30\%"), ("101_2", "101_3"), ("101_2", "5"),
        ("1A3_{16}", "1A4_{16}"), ("5 cm", "6 cm"), ("5 apples", "5 pears"), ("2 m", "2 s"),
        ("12:30", "12/30"), ("12:30", "24:60"), ("3:2", "2:3"),
    ],
    "choices and words": [
        ("B", "C"), ("B", "b"), ("B", "A or B"), ("B", "(A) or (B)"), ("B", "(A), (B)"),
        ("B", "AB"), ("B", r"\text{A and B}"), ("B", "not B"), ("B", "(C) B"),
        ("Tuesday", "Monday"), ("listen", "silent"), ("no", "on"), ("yes", "no"),
        ("yes", "yes or no"), ("true", "false"), (r"\text{Al}", "lA"), ("even", "not even"),
    ],
    "unreadable": [
        ("5", r"\frac{5"), ("5", "5}"), ("5", "5 +"), ("5", r"\foo{5}"), ("5", "5,,6"),
        ("5", "5 = "), ("1/23", r"\frac123"), ("3/2", r"\frac123"), ("11/2", "3 5/2"),
        ("5", r"5\ldots"), ("5", "5'"), ("10", "x2"), ("5", "#5"), ("5", "5 & 6"), ("25", "5 5"),
        ("5", r"\text{}"), ("5", "{}"), ("5", "()"), ("3", r"\sqrt{}"), ("5", "5_"), ("5", "^5"),
        ("6", "3!!"), ("2", r"\det(2)"), ("5", "nan"), ("5", r"\infty-\infty"), ("1", "0^0"),
        ("1", r"\infty/\infty"),
    ],
}  # fmt: skip

RULES = Rules()


def judged(gold: str, answer: str) -> Judgement:
    return judge(gold, answer, RULES, BallDecider(RULES.tolerance))


def pairs(groups: Mapping[str, Sequence[Pair]]) -> list[object]:
    return [
        pytest.param(gold, answer, id=f"{name}: {gold} / {answer}")
        for name, group in groups.items()
        for gold, answer in group
    ]


def swapped(groups: Mapping[str, Sequence[Pair]]) -> dict[str, list[Pair]]:
    return {name: [(answer, gold) for gold, answer in group] for name, group in groups.items()}


def every_pair() -> Iterator[Pair]:
    for groups in (SAME, ONLY_AS_AN_ANSWER, DIFFERENT):
        for group in groups.values():
            yield from group


@pytest.mark.parametrize(("gold", "answer"), pairs(SAME) + pairs(ONLY_AS_AN_ANSWER))
def test_what_says_the_same_is_right(gold: str, answer: str) -> None:
    judgement = judged(gold, answer)
    assert judgement.right, judgement.rule


@pytest.mark.parametrize(("gold", "answer"), pairs(swapped(SAME)))
def test_which_of_the_two_is_expected_makes_no_difference(gold: str, answer: str) -> None:
    judgement = judged(gold, answer)
    assert judgement.right, judgement.rule


@pytest.mark.parametrize(("gold", "answer"), pairs(DIFFERENT))
def test_what_says_something_else_is_wrong(gold: str, answer: str) -> None:
    judgement = judged(gold, answer)
    assert not judgement.right, judgement.rule


def test_fractions_alone_never_contradict_the_algebra() -> None:
    for gold, answer in every_pair():
        try:
            judgement = judge(gold, answer, RULES, ExactDecider(RULES.tolerance))
        except NeedsAlgebra:
            continue
        assert judgement.right == judged(gold, answer).right, (gold, answer)


def test_there_are_pairs_enough_of_either_sort() -> None:
    assert sum(map(len, SAME.values())) > 300
    assert sum(map(len, DIFFERENT.values())) > 200
