"""Running a kernel on torch's own threads.

A parallel operator of torch runs on the OpenMP team of the thread that calls it, and a second set
of threads would fight that one for the cores: idle team members spin. So kernels run on the very
same team, through the one function that every compiler's parallel regions go through.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.kernels.compiled import Kernel

LEAST_WORK = 1 << 14
"""Vector operations, some 10 microseconds of them, below which waking other threads costs more."""
MUCH_WORK = 1 << 18
"""Vector operations, some 150 microseconds of them, from which on other threads may run Python."""

_RUNTIMES = ("libgomp", "libomp", "libiomp")


class Call:
    """A kernel and what it is called with."""

    __slots__ = ("_arguments", "_kernel", "_pointer")

    def __init__(self, kernel: Kernel, num_arguments: int) -> None:
        """``num_arguments`` with the first one, which `run` sets."""
        self._arguments = np.zeros(num_arguments, dtype=np.int64)
        self._pointer: int = self._arguments.__array_interface__["data"][0]
        self._kernel = kernel

    def __setitem__(self, index: int, value: int) -> None:
        self._arguments[index] = value

    def begin(self) -> tuple[int, int]:
        """Let all of the work be taken; return where the kernel and what it is called with lie."""
        self._arguments[0] = 0
        return self._kernel.address, self._pointer

    def run(self, num_threads: int = 1, num_vectors: int = LEAST_WORK) -> None:
        """Do all of the work. What arguments point to must outlive the call.

        ``num_vectors``: operations on whole vectors that it takes, about. Few are done alone; while
        many are done other threads may run Python, which for few would cost more than it gives.
        """
        address, pointer = self.begin()
        is_long = num_vectors >= MUCH_WORK
        is_worth_it = num_threads > 1 and num_vectors >= LEAST_WORK
        parallel = parallel_function(is_long=is_long) if is_worth_it else None
        if parallel is not None:
            parallel(address, pointer, num_threads, 0)
        elif is_long:
            self._kernel.alone_for_long(pointer)
        else:
            self._kernel.alone(pointer)


@cache
def parallel_function(*, is_long: bool = False) -> Any:
    """Return GOMP_parallel(function, data, num_threads, flags) of torch's OpenMP; None: not found.

    ``is_long``: let other threads run Python meanwhile. GNU's libgomp has it, and LLVM's and
    Intel's libomp under the same name.
    """
    torch.get_num_threads()  # whoever imports torch has loaded its OpenMP
    for path in _loaded_libraries():
        if path.name.startswith(_RUNTIMES):
            library = (ctypes.CDLL if is_long else ctypes.PyDLL)(str(path))
            function = getattr(library, "GOMP_parallel", None)
            if function is not None:
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                function.restype = None
                return function
    return None


def _loaded_libraries() -> list[Path]:
    """Return the shared libraries of this process, those of torch first; only Linux tells."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = maps.read_text(encoding="utf-8").splitlines()
    paths = {Path(line[line.index("/") :]) for line in lines if "/" in line and ".so" in line}
    return sorted(paths, key=lambda path: ("torch" not in path.parts, path))
