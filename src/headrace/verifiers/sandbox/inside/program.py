"""The process of one job: it takes off what it can do, then becomes the program.

Owns: the order. Once the program's first line runs, the process holds no descriptor but 0, 1, 2
and the one its result goes to, no capability, and is under every limit, Landlock and seccomp. How
it ends is for the kernel to say; the result is the program's own word, as everything after that
first line is.
"""

from __future__ import annotations

import _thread
import atexit
import linecache
import marshal
import opcode
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from headrace.verifiers.sandbox import canonical
from headrace.verifiers.sandbox.inside import kernel, protocol
from headrace.verifiers.sandbox.inside.kernel import Call

_PAYLOAD, _RESULT = 3, 4
"""Beside 0, 1 and 2: what is to be run, and where its result goes."""

_MAX_PAYLOAD = 1 << 30
_NAME = "solution.py"
_MAIN = ModuleType("__main__")
"""The program's own module; empty in the process that forks."""
_UNCLEAN_OUTPUT = 120
"""What Python exits with when its output could not be written."""


def prepare() -> None:
    """Do before any job, in the process that forks, what is the same for all of them."""
    sys.modules["__main__"] = _MAIN
    _MAIN.__file__ = _NAME
    sys.argv = [_NAME]


def become(steps: Sequence[Call]) -> None:
    """Turn this process, just forked, into the program. Never returns.

    Its descriptors are where the program expects them.
    """
    status = 1
    try:
        kernel.make(steps)
        content = os.pread(_PAYLOAD, os.lseek(_PAYLOAD, 0, os.SEEK_END), 0)
        os.close(_PAYLOAD)
        # The supervisor's own word, and faster to read than anything that trusts nobody.
        files, command, work = marshal.loads(content)  # noqa: S302 - see above
        for name in files:
            _write(name, files[name])
        if command:
            _execute(command, *work)
        status = _run_python(*work)
    except BaseException:  # noqa: BLE001 - nothing may return to the loop that forked
        traceback.print_exc()
    finally:
        os._exit(status)


def _write(name: str, content: bytes) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor is no path
        file.write(content)


def _execute(command: list[str], product: str) -> None:
    """Run a command; where its output is wanted as a file, wait for it and hand that over."""
    os.set_inheritable(_RESULT, False)  # noqa: FBT003 - positional only
    # Python ignores these two, and what is ignored stays so in the program that comes.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if not product:
        os.execvp(command[0], command)  # noqa: S606 - what the job is
    child = os.fork()
    if child == 0:
        os.execvp(command[0], command)  # noqa: S606 - as above
    _, status = os.waitpid(child, 0)
    if status == 0:
        with open(product, "rb") as file:  # noqa: PTH123 - a plain name
            _send(protocol.RESULT_VALUE + file.read())
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _run_python(source: str, function: str, arguments: bytes, max_result_bytes: int) -> int:
    """Run the program as ``__main__``, call its function if one is asked for; return its status."""

    def run() -> None:
        exec(compile(source, _NAME, "exec", dont_inherit=True), _MAIN.__dict__)  # noqa: S102 - it is what this process is for
        if function:
            _send_value(_called(_MAIN, function, arguments), max_result_bytes)

    return _finish(_status_of(run, source))


def _called(module: ModuleType, name: str, arguments: bytes) -> object:
    owner, _, method = name.rpartition(".")
    target: Any = getattr(module, owner)() if owner else module
    function: Callable[..., object] = getattr(target, method)
    return function(*canonical.decode(arguments, max_bytes=_MAX_PAYLOAD))


def _send_value(value: object, max_bytes: int) -> None:
    """Send what the function returned; what is no plain value is named, and nothing is sent."""
    try:
        encoded = canonical.encode(value, max_bytes=max_bytes)
    except canonical.EncodeError as error:
        print(f"what the function returned cannot be compared: {error}", file=sys.stderr)  # noqa: T201 - the program's own standard error
        return
    _send(protocol.RESULT_VALUE + encoded)


def _send(result: bytes) -> None:
    """Write to where the result goes; the program may have closed it, and then there is none."""
    try:
        while result:
            result = result[os.write(_RESULT, result) :]
    except OSError:
        return


def _status_of(run: Callable[[], None], source: str) -> int:
    try:
        run()
    except SystemExit as error:
        return _exit_status(error.code)
    except MemoryError as error:
        if not _raised_by_hand(error):
            _send(protocol.RESULT_MEMORY_ERROR)
        _print(sys.exc_info(), source)
        return 1
    except BaseException:  # noqa: BLE001 - a program may raise anything; all is reported alike
        _print(sys.exc_info(), source)
        return 1
    return 0


def _raised_by_hand(error: BaseException) -> bool:
    """Whether it comes of a ``raise``, and not of what the interpreter could not do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    instruction = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return instruction == opcode.opmap["RAISE_VARARGS"]


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    print(code, file=sys.stderr)  # noqa: T201 - as sys.exit does
    return 1


def _print(raised: tuple[Any, Any, TracebackType | None], source: str) -> None:
    """Print a traceback with the program's own lines, and without the frames of this file."""
    kind, error, trace = raised
    linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        traceback.print_exception(kind, error, trace)
    except BaseException:  # noqa: BLE001 - its own __str__ may raise, or memory be gone
        os.write(2, b"an exception that cannot be printed\n")


def _finish(status: int) -> int:
    """Do what Python does at its end that can be seen: join threads, run exit handlers, flush.

    Not the teardown of every module, which would cost more than most programs.
    """
    try:
        # Where no thread is left there is none to wait for, and to ask costs as much as to compile.
        if _thread._count():  # noqa: SLF001 - threads of whatever kind
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what Py_Finalize calls
        atexit._run_exitfuncs()  # noqa: SLF001 - as above
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001 - of whatever a program put in these places
        return status or _UNCLEAN_OUTPUT
    return status
