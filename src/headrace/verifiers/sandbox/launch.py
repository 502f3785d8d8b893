"""How the process that forks is started: its command line, its environment, its first message.

Owns: it inherits nothing of this process but the socket: no variable, no descriptor, no folder. It
is found under ``headrace`` without being installed for the interpreter that runs it, which may be
another one than this.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.verifiers.sandbox.execution import Tier

PRELOAD = (
    "array",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "typing",
)
"""What programs of contests import: loaded once for all of them."""

_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # The order of sets is the same in every cell.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # A thread that a library starts when it is loaded would not live on in a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_CODE = (
    "import sys\n"
    "sys.path.insert(0, {source!r})\n"
    "from headrace.verifiers.sandbox.inside import zygote\n"
    "sys.path.pop(0)\n"
    "zygote.start({descriptor}, {folder!r})\n"
)
_SOURCE = Path(headrace.__file__).resolve().parents[1]
_NEEDED = ("headrace/__init__.py", "headrace/verifiers/__init__.py", "headrace/verifiers/sandbox")
_BOX = "/box"
"""Where programs work under bubblewrap."""
_BOX_BYTES = 256 << 20
"""All that they may write there: made before the job is known, and a compiler needs as much."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache",
           "/etc/alternatives", "/etc/localtime")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSpec:
    """What a cell is to be."""

    tier: Tier
    interpreter: str = sys.executable
    """CPython 3.11 or later, with the standard library."""
    preload: tuple[str, ...] = PRELOAD
    """Modules that are loaded before the first job."""
    shown: tuple[str, ...] = ()
    """Paths that programs may read, beside the system's and the interpreter's own."""
    num_jobs: int = 2000
    """Jobs before it is replaced."""

    @property
    def jobs_per_cell(self) -> int:
        """Jobs before it is replaced: bubblewrap's directory cannot be made anew, so one."""
        return 1 if self.tier is Tier.BUBBLEWRAP else self.num_jobs

    @property
    def needs_folder(self) -> bool:
        """Whether programs work in a folder of the host's."""
        return self.tier in {Tier.LOCK, Tier.NONE}


def start(spec: CellSpec, descriptor: int, folder: str) -> subprocess.Popen[bytes]:
    """Start the process that forks; it waits for `first_message` on ``descriptor``.

    Raises OSError when its program is not there.
    """
    command = _python_command(spec, descriptor, folder)
    if spec.tier is Tier.BUBBLEWRAP:
        command = [*bubblewrap_command(spec), *command]
    return subprocess.Popen(  # noqa: S603 - our own program
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(_ENVIRONMENT),
        cwd="/",
        pass_fds=(descriptor,),
        start_new_session=True,
    )


def first_message(spec: CellSpec, folder: str) -> bytes:
    """Return what tells it which tier to set up."""
    settings = {
        "tier": spec.tier.value,
        "preload": spec.preload,
        "shown": spec.shown,
        "folder": _BOX if spec.tier is Tier.BUBBLEWRAP else folder,
    }
    return json.dumps(settings).encode()


def bubblewrap_command(spec: CellSpec) -> list[str]:
    """Return bubblewrap's own part of the command line."""
    shown = [
        *_SYSTEM,
        *_interpreter_paths(spec),
        *spec.shown,
        *(f"{_SOURCE}/{part}" for part in _NEEDED),
    ]
    binds = [word for path in shown for word in ("--ro-bind-try", path, path)]
    devices = [
        word
        for name in ("null", "zero", "random", "urandom")
        for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    ]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--as-pid-1", "--hostname", "cell"),
        # First, since what is shown may lie below it.
        *("--tmpfs", "/tmp"),  # noqa: S108 - inside
        *binds,
        *devices,
        *("--symlink", _BOX, "/dev/shm", "--size", str(_BOX_BYTES), "--tmpfs", _BOX),  # noqa: S108 - inside
        *("--remount-ro", "/", "--chdir", "/"),
    ]


def _python_command(spec: CellSpec, descriptor: int, folder: str) -> list[str]:
    code = _CODE.format(source=str(_SOURCE), descriptor=descriptor, folder=folder)
    only_stdlib = all(name.partition(".")[0] in sys.stdlib_module_names for name in spec.preload)
    return [
        spec.interpreter,
        *("-s", "-P", "-X", "utf8", "-X", "int_max_str_digits=0"),
        # Without it programs find the packages of the interpreter's environment.
        *(("-S",) if only_stdlib else ()),
        *("-c", code),
    ]


def _interpreter_paths(spec: CellSpec) -> Sequence[str]:
    """Return where an interpreter lies: of another one, its program's place and what is beside."""
    if spec.interpreter == sys.executable:
        packages = sysconfig.get_path("purelib")
        return [sys.base_prefix, sys.prefix, packages]
    place = Path(spec.interpreter)
    return [str(place.resolve().parents[1]), str(place.parents[1])]
