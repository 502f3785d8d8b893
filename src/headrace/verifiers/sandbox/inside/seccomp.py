"""seccomp: the filter on system calls that a program in the cell runs under, and all it starts.

Owns: only what `syscalls` lists passes. What is refused gets EPERM, or ENOSYS where programs expect
a call to be missing and have another way; a call by another processor's numbers (x32, i386) ends
the process with SIGSYS, because there the numbers mean other calls. The filter is assembled here,
in the classic BPF of seccomp(2), since it must be made by the standard library of any interpreter.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

from headrace.verifiers.sandbox.inside import kernel, syscalls
from headrace.verifiers.sandbox.inside.kernel import Call

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, operand."""

_LOAD, _JUMP, _IF_EQUAL, _IF_GREATER, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = (
    0x20,
    0x05,
    0x15,
    0x25,
    0x35,
    0x45,
    0x06,
)
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in seccomp_data; an argument has 8 bytes, of which the kernel uses the lower 4 in every
call that is checked here (they are ints, or flags of clone)."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_MISSING = 0x00050000 | errno.ENOSYS
_NOTHING = 0x00050000
"""Nothing is done, and the call returns 0."""

_PASS: Instruction = (_RETURN, 0, 0, _ALLOW)

Leaf = tuple[int, int, list[Instruction]]
"""First and last number of a run of calls, and what is done with them: it ends with a return."""

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_IOCTLS = (0x5401, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS (is it a terminal?), TIOCGWINSZ, TIOCGPGRP, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTLS = (1, 2, 3, 15, 16, 23, 39, 0x53564D41)
"""Parent-death signal, dumpable?, name, capability there?, no_new_privs?, names of mappings."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032, 1033, 1034, 36, 37, 38)
"""Duplicates, flags, locks, seals, a pipe's size; not owners of signals, leases, notifications and
larger pipes."""
_UNIX = 1
_STREAMS = (1, 1 | 0x80000, 1 | 0x800, 1 | 0x80800)
"""Also closed on exec, and without waiting. A datagram could go to any socket with a path."""

_ONLY_IF: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {
    # Of itself, not of a neighbour: 0 stands for the caller.
    "prlimit64": ((0, (0,)),),
    "setpriority": ((0, (0,)), (1, (0,))),
    "sched_setaffinity": ((0, (0,)),),
    "sched_setscheduler": ((0, (0,)),),
    "sched_setparam": ((0, (0,)),),
    "ioctl": ((1, _IOCTLS),),
    "prctl": ((0, _PRCTLS),),
    "fcntl": ((1, _FCNTLS),),
    "socketpair": ((0, (_UNIX,)), (1, _STREAMS)),
}
"""Call -> places of arguments and the values that each may have."""


def program(*, may_execute: bool) -> bytes:
    """Return the filter as the kernel takes it: 8 bytes for each instruction.

    ``may_execute``: whether another program may take the place of the one that runs.
    """
    numbers = syscalls.checked()
    leaves = [(first, last, [_PASS]) for first, last in _ranges(syscalls.allowed())]
    leaves += [
        (first, last, [(_RETURN, 0, 0, _NOTHING)]) for first, last in _ranges(syscalls.ignored())
    ]
    leaves += [(numbers["clone"], numbers["clone"], _clone())]
    leaves += [(numbers["clone3"], numbers["clone3"], [(_RETURN, 0, 0, _MISSING)])]
    if may_execute:
        leaves += [(numbers["execve"], numbers["execve"], [_PASS])]
    leaves += [
        (numbers[name], numbers[name], _only_if(conditions))
        for name, conditions in _ONLY_IF.items()
    ]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[kernel.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        (_IF_GREATER, 0, 1, syscalls.LAST_KNOWN),
        (_RETURN, 0, 0, _MISSING),
        *_among(sorted(leaves, key=lambda leaf: leaf[0])),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(filter_program: bytes) -> Call:
    """Return the call that puts a process and all that come of it under the filter."""
    instructions = kernel.buffer(filter_program)
    length = len(filter_program) // 8
    # struct sock_fprog: a 16-bit length and, aligned, the address.
    header = struct.pack("@HP", length, kernel.address(instructions))
    # The last argument is one more than prctl looks at: it keeps what the address names.
    return kernel.prepared("prctl", kernel.PR_SET_SECCOMP, 2, header, instructions)


def _clone() -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _REFUSE),
        _PASS,
    ]


def _only_if(conditions: Sequence[tuple[int, tuple[int, ...]]]) -> list[Instruction]:
    code: list[Instruction] = []
    for place, values in conditions:
        code.append((_LOAD, 0, 0, _ARGUMENTS + 8 * place))
        # Each comparison that holds jumps over the rest of them and over the refusal.
        left = range(len(values) - 1, -1, -1)
        code += [(_IF_EQUAL, rest + 1, 0, value) for rest, value in zip(left, values, strict=True)]
        code.append((_RETURN, 0, 0, _REFUSE))
    return [*code, _PASS]


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending ``numbers`` as first and last of runs without a gap."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _among(leaves: Sequence[Leaf]) -> list[Instruction]:
    """Find the leaf that a number lies in by halving them, and refuse what lies in none."""
    if len(leaves) == 1:
        first, last, code = leaves[0]
        return [
            (_IF_AT_LEAST, 1, 0, first),
            (_RETURN, 0, 0, _REFUSE),
            (_IF_GREATER, 0, 1, last),
            (_RETURN, 0, 0, _REFUSE),
            *code,
        ]
    middle = len(leaves) // 2
    below, above = _among(leaves[:middle]), _among(leaves[middle:])
    # A conditional jump reaches 255 instructions, an unconditional one any.
    return [
        (_IF_AT_LEAST, 0, 1, leaves[middle][0]),
        (_JUMP, 0, 0, len(below)),
        *below,
        *above,
    ]
