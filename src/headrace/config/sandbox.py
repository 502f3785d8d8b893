"""`[verifier.sandbox]`: where code that a policy wrote is run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config.section import Section

TierName = Literal["auto", "cell", "bubblewrap", "lock"]


class ToolchainConfig(Section):
    """How programs of one language are run: by commands, in the program's own directory."""

    source: str = Field(pattern=r"^[^/\x00]+$")
    """The name that the program's file gets."""
    run: tuple[str, ...] = Field(min_length=1)
    """The command that runs it."""
    compile: tuple[str, ...] = ()
    """The command that makes ``product`` of it first; in isolation too, and once for all tests."""
    product: str = Field(default="", pattern=r"^[^/\x00]*$")
    """The file that compiling makes and running needs."""
    reserves_memory: bool = False
    """The runtime reserves far more addresses than it uses (V8, Go, the JVM): they are not limited,
    only what is written to."""

    @model_validator(mode="after")
    def _product_of_compiling(self) -> Self:
        if bool(self.compile) != bool(self.product):
            msg = "compile and product belong together: give both or neither"
            raise ValueError(msg)
        return self


def _toolchains() -> dict[str, ToolchainConfig]:
    return {
        "cpp": ToolchainConfig(
            source="main.cpp",
            compile=("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
            product="main",
            run=("./main",),
        ),
        "javascript": ToolchainConfig(
            source="main.js", run=("node", "main.js"), reserves_memory=True
        ),
    }


class SandboxConfig(Section):
    """Where code that a policy wrote is run. Read by components that run code, and by no others."""

    tier: TierName = "auto"
    """How it is isolated; docs/SANDBOX.md says what each promises. ``auto`` takes the strongest
    that works here, tried by doing; another one must work, or nothing starts."""
    allow_unsafe: bool = False
    """Run it without isolation where no tier works. Every verdict says so."""
    num_cells: int | None = Field(default=None, ge=1)
    """Programs that run side by side; null takes one for each core."""
    jobs_per_cell: int = Field(default=2000, ge=1)
    """Executions before a cell is replaced by a new one."""
    max_queued: int = Field(default=1024, ge=1)
    """Executions that wait for a cell before those who ask for more have to wait."""
    interpreter: str | None = Field(default=None, min_length=1)
    """CPython 3.11 or later that runs programs in Python; null takes headrace's own."""
    preload: tuple[str, ...] = ()
    """Modules to load once for all programs, beside those of the standard library that most need,
    such as ``numpy``. With a module from outside it, programs can import all that is installed."""
    readable: tuple[str, ...] = ()
    """Paths that programs may read, beside the system's and the interpreter's own."""
    languages: dict[str, ToolchainConfig] = Field(default_factory=_toolchains)
    """Name -> how its programs are run, beside ``python``."""
