"""Programs that attack what runs them, each with what must become of it.

A program prints BREACH where it got what it must not get; a verdict is forged where one ends clean
with the answer that it was never given. The same list is the tests' and the benchmark's. It attacks
the sandbox: what attacks a grader's comparison is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.verifiers.sandbox.execution import Ending, Limits

BREACH = b"BREACH"

LIMITS = Limits(
    cpu_seconds=0.5,
    wall_seconds=20.0,
    memory_mib=192,
    output_bytes=1 << 16,
    num_processes=16,
    disk_mib=8,
)
"""Small, so that using them up is quick; the wall clock is far, so that a busy machine changes
nothing."""

_ENDS = frozenset({Ending.EXITED, Ending.SIGNALED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program."""

    source: str
    endings: frozenset[Ending] = _ENDS
    """How it may end; never by our own failure."""
    stdout: bytes | None = None
    """What it prints, where that is the point."""
    wall_seconds: float = LIMITS.wall_seconds
    is_slow: bool = False
    """It takes a second or more: tried once, not by the thousand."""


_PRELUDE = """
import ctypes, errno, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return result, ctypes.get_errno()
def refused(name, *arguments):
    result, error = call(*arguments)
    if result >= 0:
        print("BREACH", name, result)
def raises(name, action):
    try:
        value = action()
    except (OSError, PermissionError, ProcessLookupError):
        return
    print("BREACH", name, value)
"""


def _calls(**numbers: tuple[int | str, ...]) -> str:
    """Return a program that makes system calls of x86-64 and reports each that is let through."""
    lines = [
        f"refused({name!r}, {', '.join(map(str, arguments))})"
        for name, arguments in numbers.items()
    ]
    return (
        _PRELUDE
        + "import platform\nif platform.machine() == 'x86_64':\n"
        + "\n".join(f"    {line}" for line in lines)
    )


_KERNEL = {
    "calls into the kernel's newer doors": _calls(
        io_uring_setup=(425, 8, "ctypes.create_string_buffer(256)"),
        userfaultfd=(323, 0),
        bpf=(321, 0, "ctypes.create_string_buffer(128)", 128),
        perf_event_open=(298, "ctypes.create_string_buffer(128)", 0, -1, -1, 0),
        memfd_create=(319, "b'x'", 0),
        memfd_secret=(447, 0),
        landlock=(444, 0, 0, 1),
        seccomp=(317, 1, 0, "ctypes.create_string_buffer(16)"),
        fanotify=(300, 0, 0),
        inotify=(294, 0),
        io_setup=(206, 8, "ctypes.byref(ctypes.c_ulong(0))"),
        vmsplice=(278, 1, 0, 0, 0),
        personality=(135, 0x0040000),
        quotactl=(443, 0, 0, 0, 0),
        lookup_handle=(
            303,
            -100,
            "b'/'",
            "ctypes.create_string_buffer(256)",
            "ctypes.byref(ctypes.c_int(0))",
            0,
        ),
    ),
    "keys": _calls(
        add_key=(248, "b'user'", "b'k'", "b'v'", 1, -3),
        keyctl=(250, 0, -3, 1),
        request_key=(249, "b'user'", "b'k'", 0, -3),
    ),
    "other processes' memory": _calls(
        ptrace=(101, 16, "os.getppid()", 0, 0),
        ptrace_me=(101, 0, 0, 0, 0),
        process_vm_readv=(310, "os.getppid()", 0, 0, 0, 0, 0),
        process_vm_writev=(311, "os.getppid()", 0, 0, 0, 0, 0),
        pidfd_open=(434, "os.getppid()", 0),
        pidfd_getfd=(438, 3, 0, 0),
        kcmp=(312, "os.getpid()", "os.getppid()", 0, 0, 0),
        process_madvise=(440, 3, 0, 0, 4, 0),
    ),
    "namespaces and mounts": _calls(
        unshare_user=(272, 0x10000000),
        unshare_mount=(272, 0x00020000),
        setns=(308, 0, 0),
        clone_user=(56, 0x10000000 | 17, 0, 0, 0, 0),
        clone_pid=(56, 0x20000000 | 17, 0, 0, 0, 0),
        mount=(165, "b'x'", "b'/tmp'", "b'tmpfs'", 0, 0),
        umount=(166, "b'/tmp'", 2),
        pivot_root=(155, "b'/'", "b'/'"),
        chroot=(161, "b'/'"),
        open_tree=(428, -100, "b'/'", 1),
        fsopen=(430, "b'tmpfs'", 0),
        mount_setattr=(442, -100, "b'/'", 0, "ctypes.create_string_buffer(32)", 32),
    ),
    "clone3, whose arguments no filter sees": _calls(
        clone3=(435, "ctypes.create_string_buffer(88)", 88),
    ),
    "the machine itself": _calls(
        reboot=(169, 0xFEE1DEAD, 672274793, 0),
        kexec=(246, 0, 0, 0, 0),
        init_module=(175, 0, 0, "b''"),
        swapon=(167, "b'/x'", 0),
        settime=(227, 0, "ctypes.create_string_buffer(16)"),
        adjtimex=(159, "ctypes.create_string_buffer(256)"),
        sethostname=(170, "b'x'", 1),
        syslog=(103, 3, "ctypes.create_string_buffer(64)", 64),
        iopl=(172, 3),
        acct=(163, 0),
        sync=(162,),
    ),
    "IPC that would stay": _calls(
        shmget=(29, 0x1234, 4096, 0o1600),
        semget=(64, 0x1234, 1, 0o1600),
        msgget=(68, 0x1234, 0o1600),
        mq_open=(240, "b'q'", 0o102, 0o600, 0),
    ),
    "limits and priorities of others": _calls(
        prlimit_parent=(302, "os.getppid()", 7, "ctypes.create_string_buffer(16)", 0),
        prlimit_first=(302, 1, 7, 0, "ctypes.create_string_buffer(16)"),
        setpriority_parent=(141, 0, "os.getppid()", 19),
        setpriority_user=(141, 2, 0, 19),
        setaffinity_parent=(203, "os.getppid()", 8, "ctypes.byref(ctypes.c_ulong(1))"),
        ioprio=(251, 1, 0, 0),
    ),
    "a terminal's input": _PRELUDE + "import fcntl\n"
    "for descriptor in (0, 1, 2):\n"
    "    raises('TIOCSTI', lambda: fcntl.ioctl(descriptor, 0x5412, b'x'))\n"
    "    raises('TIOCLINUX', lambda: fcntl.ioctl(descriptor, 0x541C, b'\\x02'))\n"
    "    if libc.ioctl(descriptor, ctypes.c_ulong(0x100005412), b'x') == 0:\n"
    "        print('BREACH high bits')\n",
    "raising its own limits": _PRELUDE + "import resource\n"
    "for what in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE,\n"
    "             resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_CORE):\n"
    "    soft, hard = resource.getrlimit(what)\n"
    "    if hard == resource.RLIM_INFINITY:\n"
    "        print('BREACH no limit', what)\n"
    "        continue\n"
    "    try:\n"
    "        resource.setrlimit(what, (hard + 1, hard + 1))\n"
    "        print('BREACH', what)\n"
    "    except (ValueError, OSError):\n"
    "        pass\n",
    "capabilities": _PRELUDE
    + "raises('setuid', lambda: os.setuid(0) if os.getuid() else open('/none'))\n"
    "header = (0x20080522).to_bytes(4, 'little') + bytes(4)\n"
    "found = ctypes.create_string_buffer(24)\n"
    "libc.capget(header, found)\n"
    "if any(found.raw):\n"
    "    print('BREACH capabilities', found.raw.hex())\n"
    "libc.prctl(38, 0, 0, 0, 0)\n"
    "if libc.prctl(39, 0, 0, 0, 0) != 1:\n"
    "    print('BREACH no_new_privs')\n"
    "raises('mknod', lambda: os.mknod('device', 0o600 | 0o020000, os.makedev(1, 1)))\n",
}

_FILES = {
    "files of the host": _PRELUDE + "def look(path):\n"
    "    return os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(1)\n"
    "for path in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/root/.bashrc', '/var/log',\n"
    "             '/proc/1/environ', '/proc/self/environ', '/proc/1/mem', '/proc/self/mem',\n"
    "             '/proc/1/root/etc/passwd', '/sys/kernel/notes', '/home', '/run', '/dev/mem',\n"
    "             '/dev/kmsg', '/dev/tty'):\n"
    "    raises(path, lambda: look(path))\n",
    "the parent's memory and names": _PRELUDE
    + "for name in ('environ', 'mem', 'maps', 'cmdline', 'root', 'cwd', 'status', 'ns/user'):\n"
    "    for who in (os.getppid(), 'self', 1):\n"
    "        path = f'/proc/{who}/{name}'\n"
    "        raises(path, lambda: open(path, 'rb').read(1))\n"
    "        raises(path, lambda: os.listdir(f'/proc/{who}/fd'))\n",
    "writing outside": _PRELUDE
    + "for path in ('/planted', '/usr/planted', '/etc/planted', '/dev/planted', os.__file__,\n"
    "             '/var/tmp/planted', sys.base_prefix + '/planted'):\n"
    "    raises(path, lambda: open(path, 'ab').close())\n",
    "links that lead outside": _PRELUDE + "os.symlink('/etc/passwd', 'link')\n"
    "raises('symlink', lambda: open('link').read())\n"
    "os.symlink('/', 'root')\n"
    "raises('symlink folder', lambda: open('root/etc/passwd').read())\n"
    "raises('symlink write', lambda: open('root/usr/planted', 'w'))\n"
    "raises('hard link', lambda: os.link('/etc/passwd', 'hard'))\n"
    "raises('hard link to a program', lambda: os.link('/usr/bin/env', 'hard2'))\n"
    "raises('..', lambda: open('../' * 40 + 'etc/passwd').read())\n",
    "paths that are not plain": _PRELUDE
    + "raises('fchdir', lambda: os.open('/proc/self/fd/3/..', os.O_RDONLY))\n"
    "raises('O_PATH', lambda: os.open('/etc/shadow', os.O_RDONLY))\n"
    "raises('long', lambda: open('/' + 'a/' * 3000))\n"
    "raises('truncate', lambda: os.truncate(os.__file__, 0))\n"
    "before = os.stat('/usr/bin').st_mode\n"
    "os.chmod('/usr/bin', 0o777)\n"
    "if os.stat('/usr/bin').st_mode != before:\n"
    "    print('BREACH chmod')\n"
    "raises('utime', lambda: os.utime(os.__file__))\n"
    "raises('rename', lambda: os.rename('/usr/bin/env', '/tmp/env'))\n",
    "running other programs": _PRELUDE + "import subprocess\n"
    "raises('exec', lambda: os.execv('/bin/true', ['true']))\n"
    "raises('spawn', lambda: subprocess.run(['/bin/true'], check=True))\n"
    "raises('python', lambda: subprocess.run([sys.executable, '-c', '1'], check=True))\n"
    "open('mine', 'w').write('#!/bin/sh\\n')\n"
    "os.chmod('mine', 0o4755)\n"
    "raises('own', lambda: os.execv('./mine', ['mine']))\n"
    "if os.system('true') == 0:\n"
    "    print('BREACH system')\n",
    "leaving things for the next": _PRELUDE + "open('left', 'w').write('x')\n"
    "os.makedirs('a/b/c')\n"
    "os.symlink('/', 'everything')\n"
    "os.mkfifo('pipe')\n"
    "open(b'\\xff\\xfe\\n', 'w').close()\n"
    "os.chmod('a', 0)\n"
    "try:\n"
    "    open('/dev/shm/left', 'w').write('x')\n"
    "except OSError:\n"
    "    pass\n",
    "very deep folders": _PRELUDE + "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\n",
    "filling the disk": _PRELUDE + "try:\n"
    "    with open('big', 'wb') as file:\n"
    "        for _ in range(64):\n"
    "            file.write(bytes(1 << 20))\n"
    "    print('BREACH', os.path.getsize('big'))\n"
    "except OSError as error:\n"
    "    print(error.errno in (errno.ENOSPC, errno.EFBIG))\n",
}

_NETWORK = {
    "sockets": _PRELUDE
    + "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 38, 40):\n"
    "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
    "        raises((family, kind), lambda: socket.socket(family, kind))\n"
    "raises('datagrams', lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))\n"
    "raises('internet pair', lambda: socket.socketpair(socket.AF_INET))\n",
    "the metadata address": _PRELUDE + "import urllib.request\n"
    "raises('http', lambda: urllib.request.urlopen('http://169.254.169.254/', timeout=1))\n",
    "connecting by hand": _PRELUDE + "result = libc.socket(2, 1, 0)\n"
    "if result >= 0:\n"
    "    print('BREACH', result)\n"
    "first, second = socket.socketpair()\n"
    "raises('connect', lambda: first.connect('/dev/log'))\n"
    "raises('listen', lambda: first.listen())\n",
}

_PROCESSES = {
    "signals to everyone": _PRELUDE
    + "raises('all', lambda: os.kill(-1, signal.SIGKILL) or open('/none'))\n"
    "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):\n"
    "    try:\n"
    "        os.kill(os.getppid(), number)\n"
    "    except OSError:\n"
    "        pass\n"
    "for pid in range(1, 300):\n"
    "    if pid not in (os.getpid(),):\n"
    "        try:\n"
    "            os.kill(pid, signal.SIGTERM)\n"
    "        except OSError:\n"
    "            pass\n",
    "a daemon that outlives its job": _PRELUDE + "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "        time.sleep(1000)\n"
    "    os._exit(0)\n"
    "print('done')\n",
    "a child that holds the output": _PRELUDE + "if os.fork() == 0:\n"
    "    time.sleep(1000)\n"
    "print('done', flush=True)\n"
    "os._exit(0)\n",
    "a thread bomb": _PRELUDE + "try:\n"
    "    while True:\n"
    "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    "except (RuntimeError, MemoryError):\n"
    "    os._exit(5)\n",
    "daemon threads at the end": _PRELUDE + "def spin():\n"
    "    while True:\n"
    "        pass\n"
    "for _ in range(3):\n"
    "    threading.Thread(target=spin, daemon=True).start()\n"
    "print('done')\n",
    "closing everything": "import os\nos.closerange(0, 1000)\n",
    "writing where results go": _PRELUDE + "for descriptor in range(3, 64):\n"
    "    for frame in (b'V' + b'T', b'D' + bytes(24), b'R', b'E broken', bytes(5000)):\n"
    "        try:\n"
    "            os.set_blocking(descriptor, False)\n"
    "            os.write(descriptor, frame)\n"
    "        except OSError:\n"
    "            pass\n",
    "descriptors that were left open": _PRELUDE + "found = []\n"
    "for descriptor in range(1024):\n"
    "    try:\n"
    "        os.fstat(descriptor)\n"
    "        found.append(descriptor)\n"
    "    except OSError:\n"
    "        pass\n"
    "if found != [0, 1, 2, 4]:\n"
    "    print('BREACH', found)\n",
    "what was inherited": _PRELUDE + "import gc\n"
    "known = {'PATH', 'LANG', 'HOME', 'TMPDIR', 'PYTHONHASHSEED', 'PYTHONDONTWRITEBYTECODE',\n"
    "         'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'LC_CTYPE', 'PWD'}\n"
    "if set(os.environ) - known:\n"
    "    print('BREACH', set(os.environ) - known)\n"
    "if [name for name in sys.modules if name.startswith('headrace')]:\n"
    "    print('BREACH modules')\n",
    "timers and ignored alarms": _PRELUDE + "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
    "print('done')\n",
    "another mask, session and group": _PRELUDE
    + "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    "try:\n"
    "    os.setpgid(0, 0)\n"
    "except OSError:\n"
    "    pass\n"
    "print('done')\n",
    "a parent that never waits": _PRELUDE + "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "for _ in range(30):\n"
    "    try:\n"
    "        if os.fork() == 0:\n"
    "            os._exit(0)\n"
    "    except OSError:\n"
    "        time.sleep(0.001)\n"
    "print('done')\n",
}

FORGING = {
    "exit 0 at once": "import sys; sys.exit(0)",
    "exit 0 without Python": "import os; os._exit(0)",
    "says that it passed": "print('=== 1 passed ==='); print('OK')",
    "writes a reward": "open('reward.txt', 'w').write('1.0')",
    "skips": "import unittest\nraise unittest.SkipTest('x')",
    "patches builtins": "import builtins, sys\nbuiltins.print = lambda *a, **k: None\n"
    "sys.modules['json'] = None\nbuiltins.__import__ = None",
    "walks frames": "import sys\nframe = sys._getframe()\nfound = []\n"
    "while frame:\n"
    "    found += [v for v in frame.f_locals.values() if isinstance(v, (str, bytes))]\n"
    "    frame = frame.f_back\nprint(*found, sep='\\n')",
    "walks the heap": "import gc\n"
    "found = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))]\n"
    "print(len(found) > 0)",
    "looks for what ran before in its memory": "import ctypes, gc, re\n"
    "found = [o for o in gc.get_objects() if isinstance(o, str) and 'secret-' in o]\n"
    "page = id(object()) & ~0xFFFFF\n"
    "print(found, re.findall(rb'secret-[0-9a-f]+', ctypes.string_at(page, 0x100000)), flush=True)\n"
    "for at in range(page - 0x800000, page, 0x1000):\n"
    "    print(re.findall(rb'secret-[0-9a-f]+', ctypes.string_at(at, 0x1000)), flush=True)\n",
    "all subclasses": "print(len(().__class__.__base__.__subclasses__()) > 0)",
    "an exception in everything": "class E(BaseException):\n"
    "    def __str__(self): raise E\n    __repr__ = __str__\nraise E",
    "replaces its output": "import io, sys\nsys.stdout = sys.stderr = io.StringIO()\nprint('x')",
    "exits in a thread": "import threading, os\n"
    "threading.Thread(target=os._exit, args=(0,)).start()",
    "dies by its own hand": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "an exit handler that exits": "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
}

_KILLED_ELSEWHERE = (
    "import platform\nif platform.machine() != 'x86_64':\n    os.kill(os.getpid(), signal.SIGSYS)\n"
)
"""The attack is one of x86-64's; on other processors the program ends as it should there."""

_CPU = frozenset({Ending.TIMEOUT_CPU})
_USES_UP: Mapping[str, Attack] = {
    "a fork bomb": Attack(
        source=_PRELUDE + "try:\n    while True:\n        os.fork()\n"
        "except OSError:\n    os._exit(5)\n",
        endings=_ENDS | {Ending.VIOLATION, Ending.OOM},
    ),
    "deep recursion": Attack(
        source="import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        endings=_ENDS | {Ending.TIMEOUT_CPU, Ending.OOM},
        is_slow=True,
    ),
    "deep recursion in C": Attack(
        source="import sys\nsys.setrecursionlimit(10**6)\nx = []\n"
        "for _ in range(10**5): x = [x]\nrepr(x)",
        endings=_ENDS | {Ending.TIMEOUT_CPU, Ending.OOM},
        is_slow=True,
    ),
    "spins": Attack(source="while True: pass", endings=_CPU, is_slow=True),
    "spins in many processes": Attack(
        source=_PRELUDE + "for _ in range(3): os.fork()\nwhile True: pass",
        endings=_CPU,
        is_slow=True,
    ),
    "spins with its warnings ignored": Attack(
        source=_PRELUDE + "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        endings=_CPU,
        is_slow=True,
    ),
    "spins in children that nobody waits for": Attack(
        source=_PRELUDE + "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "while True:\n    if os.fork() == 0:\n        end = time.process_time() + 0.2\n"
        "        while time.process_time() < end: pass\n        os._exit(0)\n    time.sleep(0.1)",
        endings=_CPU | {Ending.EXITED, Ending.TIMEOUT_WALL, Ending.VIOLATION},
        is_slow=True,
    ),
    "sleeps": Attack(
        source="import time; time.sleep(1000)",
        endings=frozenset({Ending.TIMEOUT_WALL}),
        wall_seconds=0.5,
        is_slow=True,
    ),
    "stops itself": Attack(
        source="import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        endings=frozenset({Ending.TIMEOUT_WALL}),
        wall_seconds=0.5,
        is_slow=True,
    ),
    "waits for input that does not come": Attack(source="import sys; print(sys.stdin.read())"),
    "allocates at once": Attack(
        source="x = bytearray(1 << 40)", endings=frozenset({Ending.OOM})
    ),
    "allocates until there is no more": Attack(
        source="x = []\nwhile True: x.append(bytes(1 << 20))", endings=frozenset({Ending.OOM})
    ),
    "allocates in children": Attack(
        source=_PRELUDE + "for _ in range(3): os.fork()\nx = []\n"
        "for _ in range(120): x.append(b'x' * (1 << 20))\ntime.sleep(5)",
        endings=frozenset({Ending.OOM, Ending.EXITED, Ending.SIGNALED}),
        is_slow=True,
    ),
    "shares memory": Attack(
        source=_PRELUDE + "import mmap\nm = [mmap.mmap(-1, 64 << 20) for _ in range(16)]\n"
        "for part in m: part.write(b'x' * (64 << 20))",
    ),
    "prints without end": Attack(
        source="while True: print('x' * 1000)", endings=frozenset({Ending.OUTPUT_LIMIT})
    ),
    "complains without end": Attack(
        source="import sys\nwhile True: sys.stderr.write('x' * 1000)",
        endings=frozenset({Ending.OUTPUT_LIMIT}),
    ),
    "fills where results go": Attack(
        source=_PRELUDE + "while True: os.write(4, bytes(4096))",
        endings=frozenset({Ending.OUTPUT_LIMIT}),
    ),
    "x32 calls": Attack(
        source=_PRELUDE + _KILLED_ELSEWHERE +
        "call(0x40000000 + 39)\nprint('BREACH')",
        endings=frozenset({Ending.VIOLATION}),
    ),
    "calls by another processor's numbers": Attack(
        source=_PRELUDE + _KILLED_ELSEWHERE + "import mmap\n"
        # mov eax, 20 (getpid of i386); int 0x80; ret
        "code = mmap.mmap(-1, 4096, prot=7)\ncode.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(at)()\nprint('BREACH')",
        endings=frozenset({Ending.VIOLATION}),
    ),
    "a bad call in a child": Attack(
        source=_PRELUDE + "if os.fork() == 0:\n    call(0x40000000 + 39)\n    print('BREACH')\n"
        "os.wait()",
        endings=_ENDS | {Ending.VIOLATION},
    ),
}  # fmt: skip

ATTACKS: Mapping[str, Attack] = {
    **{
        name: Attack(source=source)
        for group in (_KERNEL, _FILES, _NETWORK, _PROCESSES, FORGING)
        for name, source in group.items()
    },
    **_USES_UP,
}
