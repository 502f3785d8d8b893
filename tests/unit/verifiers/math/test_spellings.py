"""Honest spellings of an answer, each refused once or nearly so, and what only looks like one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from headrace.verifiers.math.algebra import BallDecider
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.judging import judge

# Expected answer -> what is right.
RIGHT = {
    "B": (
        r"\text{B}", r"\textbf{(B)}", r"\textbf{(B)}\ 12", r"\text{(B) }12", "B", "(B)",
        r"\mathrm{B}", r"\text{Option B}", r"\textbf{B}",
    ),
    "5 cm": (
        "5", "5 cm", r"5\text{ cm}", r"5\,\text{cm}", r"5~\text{cm}", r"5\,\mathrm{cm}",
        r"5\ \mathrm{cm}", r"5\text{ centimeters}", "5 centimeters", "5 centimetres", "5cm",
        r"\text{5 cm}", r"5\;cm", "x = 5 cm", r"x=5\text{ cm}", "5.0 cm", r"5 \text{ cm.}",
        r"5\mathrm{~cm}", r"5\text{cm}", r"5\operatorname{cm}", r"5 \mbox{ cm}",
        r"5\text{ centimeter}", r"5\textrm{ cm}", r"5\,cm", r"5\textbf{ cm}",
    ),
    "12 m/s": (
        "12 m/s", r"12\text{ m/s}", r"12\,\text{m/s}", r"12\ \mathrm{m/s}", r"12 \frac{m}{s}",
        r"12\,\frac{\text{m}}{\text{s}}", "12 meters per second", r"12\text{ meters per second}",
        "12 m s^{-1}", r"12 \text{m}/\text{s}", "12", r"12\,\mathrm{m}/\mathrm{s}", "12 m·s⁻¹",
        r"12\text{ m}\cdot\text{s}^{-1}",
    ),
    "9 cm^2": (
        "9 cm^2", r"9\text{ cm}^2", r"9\,\text{cm}^2", r"9\text{ cm}^{2}", "9 square centimeters",
        r"9\text{ square centimeters}", r"9\ \mathrm{cm}^2", "9 cm²", r"9\text{ sq cm}",
        "9 sq. cm", r"9\text{ square cm}", r"9\text{ cm²}", r"9\,\mathrm{cm^2}",
        r"9\text{ cm}\!^2", r"9\text{ centimeters squared}", "9",
    ),
    r"50\%": (
        r"50\%", "50%", "50", "50 percent", r"50\text{ percent}", r"50\text{\%}", r"50 \%",
        r"50\ \%", r"50.0\%", "50 per cent",
    ),
    r"30^\circ": (
        r"30^\circ", r"30^{\circ}", "30°", "30", "30 degrees", r"30\text{ degrees}", r"30\degree",
        r"30^\text{o}", r"30\,^\circ", r"30 ^\circ", r"\angle A = 30^\circ", "30 deg",
        r"30^{\text{o}}", r"{30}^{\circ}", "30º",
    ),
    r"\$5": (
        r"\$5", "$5", "5", "5 dollars", r"5\text{ dollars}", r"\$5.00", "5.00", r"\text{\$}5",
        "5 USD", r"\$ 5", r"\mathdollar 5", r"5\$", r"US\$5",
    ),
    "1/x": (
        r"\frac1x", r"\frac{1}{x}", "x^{-1}", "1/x", r"{1 \over x}", r"1 \over x", r"\dfrac1x",
        "x⁻¹", r"\dfrac{1}{x}", r"\tfrac{1}{x}", "y=1/x", r"f(x)=\frac{1}{x}", r"1\div x",
        r"\frac{1}{x} \quad", "1 / x", "x^(-1)", "x**-1", "x**(-1)", "x^-1", r"\frac 1 x",
        r"\frac 1{x}", r"\frac{1}x", "(1)/(x)", r"\left(x\right)^{-1}", r"\frac{\,1\,}{x}",
    ),
    "a/b": (
        r"a\over b", r"{a\over b}", r"\frac{a}{b}", "a/b", r"\frac ab", "ab^{-1}",
        r"\frac{a}{b}.", r"a\,/\,b", r"\frac{\displaystyle a}{\displaystyle b}", "a b^{-1}",
        r"\nicefrac{a}{b}", r"\sfrac{a}{b}",
    ),
    "|x|>1": (
        "|x|>1", r"x<-1 \text{ or } x>1", r"(-\infty,-1)\cup(1,\infty)", r"\lvert x\rvert > 1",
        r"\left|x\right|>1", "1<|x|", r"x\in(-\infty,-1)\cup(1,\infty)", "x > 1 or x < -1",
        r"\mathbb{R}\setminus[-1,1]", r"]-\infty,-1[\cup]1,\infty[", r"\abs{x}>1", r"x<-1,\ x>1",
        r"x<-1\lor x>1", r"x<-1 \vee x>1",
    ),
    r"(-\infty,-1)\cup(1,\infty)": (
        "|x|>1", r"x<-1 \text{ or } x>1",
    ),
    "(1,2]": (
        "(1,2]", "]1,2]", r"1<x\le2", r"1 < x \leq 2", r"x\in(1,2]", r"x \in ]1,2]", "(1, 2]",
        r"\left(1,2\right]", "]1;2]", "(1;2]", r"2\ge x>1", r"x>1 \text{ and } x\le 2",
        r"x > 1, x \le 2", r"\{x\mid 1<x\le2\}", r"\{x\in\mathbb{R}: 1<x\leq 2\}",
        r"\{x : 1<x\leq 2\}", r"\left]1,2\right]", "1<x≤2", r"\{x\in\mathbb R\mid 1<x\le 2\}",
        r"(1,2\,]", r"1 \lt x \le 2", r"1<x\leqslant 2", r"x\in\left(1,2\right]",
        r"1<x\wedge x\le2", r"\lparen 1,2\rbrack",
    ),
    r"[1,\infty)": (
        r"[1,\infty)", r"[1,+\infty)", r"x\ge1", r"[1,\infty[", "[1, +∞)", r"x \geqslant 1",
        r"1\le x", "x≥1", r"x\in[1,\infty)", "x >= 1", r"x \geq 1", r"1 \leq x < \infty",
        r"[1,+\infty[", "[1, inf)", "[1, oo)", "[1,infinity)", r"\left[1,\infty\right)",
        r"\{x|x\ge1\}", r"\lbrack 1, \infty \rparen",
    ),
    r"\mathbb{R}": (
        r"\mathbb{R}", r"(-\infty,\infty)", r"\text{all real numbers}", r"\mathbb R",
        r"x\in\mathbb{R}", r"\R", "\u211d", "all real numbers", "all reals", r"\text{all reals}",
        r"-\infty<x<\infty", r"\text{All real numbers}", "(-∞, ∞)", r"\mathbb{R}.",
        r"]-\infty,\infty[", r"(-\infty,+\infty)", r"\forall x\in\mathbb{R}",
    ),
    r"\emptyset": (
        r"\emptyset", r"\varnothing", r"\{\}", "∅", r"\text{no solution}", "no solution",
        r"\text{no solutions}", "no real solutions", r"\text{There is no solution}", "{}",
        r"\text{empty set}", "No solution.", r"\text{none}", r"\text{no real solution}",
        r"x\in\emptyset", r"\text{No solutions exist}", r"x \in \varnothing",
    ),
    "1,2": (
        "1,2", "2,1", r"\{1,2\}", "1, 2", "1 and 2", r"1\text{ and }2", "x=1,2", "x=1 or x=2",
        "x=1,x=2", "x_1=1, x_2=2", r"x = 1 \text{ or } x = 2", "1;2", r"\{2,1\}", r"x=1\lor x=2",
        r"x\in\{1,2\}", r"1\text{, }2", r"1, \quad 2", r"1,\ 2", r"1\ \text{and}\ 2",
        r"x = 1 \vee x=2", r"1 \text{ or } 2", r"x \in \{1, 2\}", r"x=1\text{ and }x=2",
        r"x=1 \; \text{or} \; x=2", r"\left\{1,2\right\}", r"\lbrace 1,2\rbrace",
        r"x_{1}=1,\ x_{2}=2", "x_1=1 and x_2=2", r"1\,,\,2", "x=2, x=1", "x=1; x=2", "x=1, 2",
        r"x = 1, \ x = 2",
    ),
    r"\pm 3": (
        r"\pm3", "3,-3", "-3,3", r"x=\pm3", r"\{-3,3\}", r"3 \text{ or } -3",
        r"x=3 \text{ or } x=-3", "±3", "-3 and 3", "+3,-3", r"\{\pm3\}", "x=3,-3", r"x=-3,\ x=3",
        "3 and -3", "+/-3", r"\pm 3.", r"3, \, -3", r"\mp 3", r"\pm\sqrt{9}",
    ),
    "(1,2)": (
        "(1,2)", "(1, 2)", r"\left(1,2\right)", "(x,y)=(1,2)", "x=1,y=2", "x = 1, y = 2",
        r"x=1 \text{ and } y=2", "(1;2)", r"\langle1,2\rangle",
        r"\begin{pmatrix}1\\2\end{pmatrix}", "(1.0,2.0)", r"\big(1,2\big)", r"\bigl(1,2\bigr)",
        "(x, y) = (1, 2)", r"x=1,\ y=2", "P=(1,2)", r"\text{(1, 2)}", r"(1,\,2)", r"(1,\ 2)",
        "y=2, x=1",
    ),
    "x=1, y=2": (
        "x=1,y=2", "(1,2)", "(x,y)=(1,2)", r"x=1 \text{ and } y=2", "y=2,x=1",
        r"x = 1, \quad y = 2", "x=1; y=2", "1,2", "x = 1 and y = 2", r"y=2 \text{ and } x=1",
    ),
    "(1,2,3)": (
        "(1,2,3)", r"\langle 1,2,3\rangle", "(1, 2, 3)", r"\begin{pmatrix}1\\2\\3\end{pmatrix}",
        r"\begin{bmatrix}1\\2\\3\end{bmatrix}", "[1,2,3]", "x=1,y=2,z=3", "(a,b,c)=(1,2,3)",
        r"\begin{pmatrix}1&2&3\end{pmatrix}", r"\left\langle 1,2,3\right\rangle",
    ),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)",
        r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"A=\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\cr3&4\end{pmatrix}",
        r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}", r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}",
        r"\left(\begin{smallmatrix}1&2\\3&4\end{smallmatrix}\right)",
        r"\bigl(\begin{smallmatrix}1&2\\3&4\end{smallmatrix}\bigr)",
        r"\begin{bmatrix}1 & 2\\ 3 & 4\end{bmatrix}",
    ),
    "2A_{16}": (
        "2A_{16}", "2A_16", "2A", r"\text{2A}_{16}", r"2A_{\text{16}}", "(2A)_{16}",
        r"2\text{A}_{16}", "2a_{16}", r"\mathrm{2A}_{16}", "0x2A", "2A_{hex}", r"2A_{\text{hex}}",
        "{2A}_{16}", "2A₁₆",
    ),
    "101_2": (
        "101_2", "101", "101_{2}", "(101)_2", r"101_{\text{2}}", r"\text{101}_2", "101_{two}",
        r"101_{\text{two}}", "{101}_2", "(101)_{2}", "101₂", "0b101", r"101 \text{ base } 2",
        "101 (base 2)",
    ),
    r"\frac{x^2}{2}+C": (
        r"\frac{x^2}{2}+C", r"\frac{x^2}{2}+c", r"\frac12x^2+C", r"C+\frac{x^2}{2}",
        r"\frac{x^2}{2}+K", "0.5x^2+C", r"\frac{1}{2}x^{2}+\text{C}", r"\frac{x^2}{2}+\mathrm{C}",
        r"\frac{x^2}{2} + \text{constant}", "x^2/2 + c", r"\frac{x^2}{2}+\text{const}",
        r"\frac{x^2}{2}+C_1", r"F(x)=\frac{x^2}{2}+C", "x²/2 + C",
    ),
    r"\ln|x|+C": (
        r"\ln|x|+C", r"\ln|x|+c", r"\ln\left|x\right|+C", r"\log|x|+C", r"\ln\lvert x\rvert+C",
        r"\ln{|x|}+C", "ln|x| + C", "ln(|x|)+c", r"\ln(|x|)+C",
    ),
    "x^2-1": (
        "(x-1)(x+1)", "x^2-1", "x^{2}-1", "-1+x^2", "x²-1", "x^2 - 1", "x*x-1", "x·x\u22121",
        r"(x+1)\cdot(x-1)", r"(x+1)\times(x-1)", r"\left(x-1\right)\left(x+1\right)", "x^2+(-1)",
        "f(x)=x^2-1", "y=x^2-1", "x**2-1", "{x}^2-1", "{x^2}-1", "x^2-1=(x-1)(x+1)",
        r"x\cdot x-1", "(x + 1)(x - 1)", r"\left(x+1\right) (x-1)",
    ),
    "y=2x+1": (
        "y=2x+1", "2x+1", "y-2x=1", "2x-y+1=0", "y = 1+2x", "f(x)=2x+1", "y=2x+1.", "2x+1=y",
        "y = 2 x + 1", r"y=2\cdot x+1", "y=2x + 1", r"y\,=\,2x+1", r"y=2\left(x+\frac12\right)",
        "y-1=2x", r"\text{y = 2x + 1}",
    ),
    r"\frac{3}{4}": (
        "3/4", r"\frac34", "0.75", r"\dfrac{3}{4}", r"\tfrac34", "¾", r"\frac{6}{8}", r"3\div4",
        r"\frac{3}{4}\approx0.75", ".75", r"\frac{3}{4}=0.75", "0.75 = 3/4", r"{3\over4}",
        r"3\over 4", r"\frac{-3}{-4}", r"\left(\frac34\right)", "(3/4)", r"\cfrac{3}{4}",
        "3/4 = 0.75", r"\displaystyle\frac{3}{4}", r"\nicefrac{3}{4}", "3 / 4",
        r"\frac{3}{4}\text{ or }0.75", "0.75 or 3/4", r"\frac3{4}", r"\frac{3}4", "3\u20444",
    ),
    r"-\frac{1}{2}": (
        "-1/2", r"-\frac12", r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5", "-.5", "\u22121/2",
        "\u2013½",
        r"-\tfrac{1}{2}", r"\frac{-1}2", "-(1/2)", r"-\left(\frac12\right)", r"-\frac{1}{2}",
        r"x=-\frac12", r"- \frac{1}{2}", "(-1)/2", r"-{\frac{1}{2}}", r"-1\over2",
        r"{-1 \over 2}", r"{-}\frac12",
    ),
    "12000": (
        "12,000", "12 000", r"12\,000", "12{,}000", r"1.2\times10^4", "12000", "1.2e4",
        r"1.2 \cdot 10^{4}", r"12,\!000", r"\text{12,000}", "12'000", "12 thousand", "12000.00",
        "12000.", "1.2*10^4", r"12\cdot10^3", "1.2\u00d710⁴", "1.2 x 10^4", r"12\text{,}000",
        "1.2E4",
        r"1.2 \times 10^{4}",
    ),
    r"\sqrt{3}": (
        r"\sqrt3", r"\sqrt{3}", "3^{1/2}", r"3^{\frac12}", "√3", "sqrt(3)", "3^{0.5}",
        r"\sqrt{\,3\,}", r"\sqrt 3", r"\sqrt[2]{3}", "√(3)", "3^(1/2)", r"\frac{3}{\sqrt3}",
        r"\sqrt{3}\approx1.732", r"\left(3\right)^{1/2}", "√{3}", r"\surd 3", r"\sqrt{3}.",
        r"\sqrt{ 3 }", r"\frac{3\sqrt3}{3}", "3**0.5", "3**(1/2)",
    ),
    r"2\sqrt{3}": (
        r"2\sqrt3", r"\sqrt{12}", "2√3", "2*sqrt(3)", r"2\cdot\sqrt{3}", r"2 \sqrt{3}", "√12",
        r"2\times\sqrt3", "2sqrt(3)", "2 sqrt 3", r"2\,\sqrt{3}", r"\sqrt{3}\cdot2", r"\sqrt3*2",
        r"2{\sqrt{3}}", r"(2)\sqrt{3}", r"\frac{6}{\sqrt{3}}", r"2(\sqrt{3})", "2·√3",
    ),
    r"\pi": (
        r"\pi", "π", "pi", r"\pi.", r"{\pi}", r"1\pi", r"\pi\text{ radians}", r"\pi \text{ rad}",
        r"\text{π}", r"\mathrm{\pi}", r"x=\pi", r"\frac{2\pi}{2}", r"\arccos(-1)", r"4\arctan 1",
        r"\uppi",
    ),
    r"\frac{\pi}{6}": (
        r"\pi/6", r"\frac{\pi}{6}", r"\frac{1}{6}\pi", "π/6", r"\tfrac{\pi}{6}", r"\frac\pi6",
        r"\frac{π}{6}", "pi/6", r"{\pi\over6}", r"\frac16\pi", "(1/6)π", r"\pi / 6",
        r"\arcsin\frac12", r"\sin^{-1}(1/2)", r"\arctan(1/\sqrt{3})", r"\theta=\frac{\pi}{6}",
        r"\frac{\pi}{6}\text{ rad}", r"\frac{\pi}{6}\text{ radians}",
    ),
    "3+4i": (
        "3+4i", "4i+3", r"3+4\mathrm{i}", "3 + 4i", r"3+4\cdot i", "3+4*i", "z=3+4i",
        r"\left(3+4i\right)", r"3+4\text{i}", "3 + 4 i", "(3+4i)", "4i + 3",
    ),
    "2^{10}": (
        "1024", "2^{10}", "2^10", "1,024", "2**10", "4^5", "2^{10}.", "2¹⁰",
    ),
    "10": (
        "ten", "10", "10.0", r"\text{ten}", "Ten", "X=10", r"10\text{ apples}", "10 apples",
        r"10\text{ years old}", "10 years", "n=10", r"1\times10^1", r"\text{10}", "10.", "+10",
        r"10\text{ units}", r"10\text{ ways}", r"10\text{ square units}", r"10\text{ units}^2",
        r"\approx 10", r"\approx10", "≈10", "=10", r"10\;", r"10\qquad", r"10 \text{ inches}",
        r"\underline{10}", r"\color{blue}{10}", r"\textcolor{red}{10}", r"{\color{red}10}",
        r"\bold{10}", r"\mathbf{10}", r"\bf{10}", r"\text{\$10}", r"\textbf{10}", r"\emph{10}",
        r"\Large 10", r"\large{10}", r"\mathit{10}",
    ),
    "0.333": (
        "0.333", ".333", "333/1000", "0.3330",
    ),
    "1/3": (
        r"0.\overline{3}", "0.(3)", "1/3", r"0.\dot{3}", r"0.\bar{3}", r"0.\bar3",
        r"0.3\overline{3}", r"\frac{1}{3}", "⅓", r"\frac{1}{3}\approx 0.333", r"0.\overline{33}",
        r"0.\dot3", r"0.333\overline{3}",
    ),
    "7/2": (
        "3.5", r"3\frac12", r"3\frac{1}{2}", "3 1/2", r"\frac72", "3½", r"3\,\frac{1}{2}",
        r"3\tfrac12", "7/2", r"3+\frac12", r"3\text{ }\frac12", r"3 \frac{1}{2}", "3.50",
        r"3\ \frac{1}{2}", r"3\dfrac{1}{2}", "3 ½",
    ),
    "12:30": (
        "12:30", "12 : 30", "12{:}30", r"\text{12:30}", r"12:30 \text{ PM}", "12:30 PM",
        "12:30 p.m.",
    ),
    "2:3": (
        "2:3", "2 : 3", r"2\colon3", "2{:}3", r"2\text{ to }3", "2 to 3", "2:3.", "2\u22363",
    ),
    r"x\ge2": (
        r"x\ge2", r"[2,\infty)", r"2\le x", "x >= 2", "x≥2", r"x\geq2", r"2x\ge4", "x ⩾ 2",
        r"x\in[2,+\infty)", r"x\geqslant2", r"x \ge 2.",
    ),
    r"x<1 \text{ or } x>3": (
        r"x<1 \text{ or } x>3", r"(-\infty,1)\cup(3,\infty)", "x>3 or x<1",
        r"x\in(-\infty,1)\cup(3,\infty)", "x<1, x>3", "|x-2|>1", r"x<1\lor x>3",
        r"x < 1 \text{ or } 3 < x", r"\mathbb{R}\setminus[1,3]", "(-∞,1)\u222a(3,∞)",
    ),
    r"\text{Tuesday}": (
        r"\text{Tuesday}", "Tuesday", r"\mathrm{Tuesday}", r"\textbf{Tuesday}",
        r"\textit{Tuesday}", r"\text{ Tuesday }", r"\text{Tuesday.}",
    ),
    r"\text{Yes}": (
        r"\text{Yes}", "Yes", r"\text{yes}",
    ),
    "e^{2}": (
        "e^2", "e^{2}", r"\exp(2)", r"\mathrm{e}^2", "exp(2)", r"\exp{2}", r"e\cdot e", "e²",
        r"\text{e}^2", "{e}^{2}",
    ),
    r"\log_2 3": (
        r"\log_2 3", r"\log_2(3)", r"\log_{2}3", r"\frac{\ln3}{\ln2}", "log_2(3)", "log_2 3",
        r"\frac{\log 3}{\log 2}", r"\log_{2}{3}", r"\log_2{3}", "ln3/ln2",
        r"\operatorname{log}_2 3", r"\lg3/\lg2", "log₂3", "log₂(3)", r"\log_{2}\left(3\right)",
        r"\frac{1}{\log_3 2}",
    ),
    r"\binom{5}{2}": (
        "10", r"\binom52", "C(5,2)", r"{5\choose2}", r"\tbinom{5}{2}", r"\frac{5!}{2!3!}",
        r"\dbinom{5}{2}", "_5C_2", "{}_5C_2", "^5C_2", "{}^5C_2", r"\binom{5}{3}", r"5\choose 2",
    ),
    "n!": (
        "n!", "n(n-1)!", r"\Gamma(n+1)", "n !", r"\text{n!}", "(n)!",
    ),
    "f(x)=x^2": (
        "f(x)=x^2", "x^2", "y=x^2", "f(x) = x^{2}", "f(x)=x²", r"f : x \mapsto x^2",
        r"f\colon x\mapsto x^2",
    ),
    r"\frac{R}{r}": (
        "R/r", r"\frac{R}{r}", r"{R\over r}", r"R\cdot r^{-1}",
    ),
    r"\overline{AB}": (
        r"\overline{AB}", r"\overline{A B}", r"\bar{AB}",
    ),
    "90": (
        r"90^\circ", "90 degrees", "90°", "90",
    ),
}  # fmt: skip

# Expected answer -> what is wrong.
WRONG = {
    "5": (
        "5!", r"4} \fbox{6",
    ),
    "x=1, y=2": (
        "2,1", "x=2,y=1", "(2,1)", "y=1,x=2", "x=1", "1", "x=1,y=2,z=3", "x=1,x=2", "a=1,b=2",
        "x=1 or y=2",
    ),
    "x=1,y=2,z=3": (
        "3,2,1", "1,3,2", "(3,2,1)",
    ),
    "(1,2)": (
        "y=1,x=2", "x=2,y=1", "2,1", r"\{1,2\}",
    ),
    "3": (
        "3 dozen", r"3\text{ dozen}",
    ),
    "36": (
        "3",
    ),
    r"\frac{x^2}{2}+C": (
        r"\frac{x^2}{2}", r"\frac{x^2}{2}+x", r"\frac{x^2}{2}-1", r"\frac{x^3}{2}+C",
        r"\frac{x^2}{2}+x+C", r"\frac{x^2}{2}+y", r"\frac{cx^2}{2}+c",
    ),
    "a+c": (
        "a+C", "a+k", "C+a", "c+k",
    ),
    "x+C": (
        "y+C", "x+x",
    ),
    "2A_{16}": (
        "2B_{16}", "2A_{15}", "2A_{8}", "42", "42_{10}", "A2", "2A_{12}",
    ),
    "101_2": (
        "101_3", "5", "5_{10}", "110_2", "1012", "101_{20}",
    ),
    "|x|>1": (
        "|x|<1", "x>1", "x<-1", r"|x|\ge1", "(-1,1)", r"x>1 \text{ and } x<-1", "|y|>1", "|x|>-1",
        r"[-\infty,1)", "|x|>2",
    ),
    "(1,2]": (
        "[1,2]", "(1,2)", "[1,2)", "]1,2[", "[1,2[", "(2,1]", "1<x<2", r"x\le2", "]2,1]",
        "(1,2],(3,4]",
    ),
    "x^{-1}": (
        "x", "x^1", "-x^1", "x^{-2}", "x-1",
    ),
    "x^2-1": (
        "x^2-1=0", "x^2-1=x^2+1", "x^2", "(x-1)^2", "x^2-1 or x^2+1", "x^2-1=(x-1)(x+2)",
    ),
    r"\frac{3}{4}": (
        "3/4 or 4/3", r"\frac{3}{4}\text{ or }0.74", "0.75 or 0.76", "3,4", "3.4", "4/3",
        r"\frac{3}{4}=0.74",
    ),
    "12:30": (
        "12:31", "12/30", "1:30",
    ),
    "12:30 pm": (
        "12:30 am",
    ),
    "10": (
        "1 0",
    ),
    r"\binom{5}{2}": (
        "{}_6C_2", r"\binom{2}{5}", "_2C_5",
    ),
    "12 m/s": (
        "12 m", "12 s/m", r"12\frac{s}{m}", "12 m s", "12 km/s", "12 m^2/s", "12 m/s^2",
        "12 m s^{-2}",
    ),
    "9 cm^2": (
        "9 cm", "9 cm^3", "9 m^2", r"9\text{ cm}^3", "9 cubic centimeters", "9 cm cubed",
    ),
    r"\$5": (
        "5 euros", "€5", "5 cents", "5€",
    ),
    "5 cm": (
        "5 m", "5 mm", "5 cm^2", "5 inches",
    ),
    r"50\%": (
        "0.5", "5%", "50/2",
    ),
    r"30^\circ": (
        "30 radians", "30^o5", "3^{0o}", "30^{2}",
    ),
    r"\emptyset": (
        "0", r"\{0\}", "some solution", "1", r"\text{one solution}",
    ),
    "1/x": (
        "x", "1/y", r"1\over y", r"x\over 1", r"{x \over 1}", "-1/x",
    ),
    "(a+b)/c": (
        r"a+{b\over c}", "a+b/c",
    ),
    r"a+\frac{b}{c}": (
        r"a+b\over c",
    ),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
        "[[1,3],[2,4]]", "[[1,2,3,4]]", "[[1,2],[3]]", "[1,2,3,4]", "[[1,2],[3,4],[5,6]]",
    ),
    r"\overline{AB}": (
        r"\overline{AC}", r"\vec{AB}",
    ),
    "6": (
        "3!2",
    ),
    "12000": (
        "12,00", "12'00", "12 00", "1.2 x 10^3",
    ),
}  # fmt: skip

RULES = Rules()


def is_right(gold: str, answer: str) -> bool:
    return judge(gold, answer, RULES, BallDecider(RULES.tolerance)).right


def pairs(table: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(gold, answer) for gold, answers in table.items() for answer in answers]


@pytest.mark.parametrize(("gold", "answer"), pairs(RIGHT))
def test_an_honest_spelling_is_paid(gold: str, answer: str) -> None:
    assert is_right(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), pairs(WRONG))
def test_what_only_looks_like_it_is_not(gold: str, answer: str) -> None:
    assert not is_right(gold, answer)


@pytest.mark.parametrize("gold", RIGHT)
def test_what_may_be_answered_may_be_expected(gold: str) -> None:
    assert is_right(gold, gold)
