"""The system calls that a program in the cell may make, by name, with their numbers.

An allow-list: what is not here is refused. Each entry is a name, its number on x86-64 and on arm64;
a dash where the processor has no such call. Numbers are from Linux' own tables (asm/unistd_64.h,
asm-generic/unistd.h). Judges nothing: `seccomp` turns it into a filter.
"""

from __future__ import annotations

from headrace.verifiers.sandbox.inside import kernel

_ALLOWED = """
    # reading and writing what is open
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv
    295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57,
    close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, fsync
    74 82, fdatasync 75 83, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, sendfile
    40 71, copy_file_range 326 285, flock 73 32, readahead 187 213,
    # files, which Landlock judges by their place
    open 2 -, openat 257 56, openat2 437 437, creat 85 -, stat 4 -, fstat 5 80, lstat 6 -,
    newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat
    269 48, faccessat2 439 439, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49,
    fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258
    34, rmdir 84 -, unlink 87 -, unlinkat 263 35, link 86 -, linkat 265 37, symlink 88 -,
    symlinkat 266 36, readlink 89 -, readlinkat 267 78, truncate 76 45, umask 95
    166, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, mknod 133 -, mknodat
    259 33, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr
    195 12, flistxattr 196 13,
    # memory
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, msync 26 227, mincore 27 232,
    madvise 28 233, brk 12 214, membarrier 324 283,
    # waiting
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1
    291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
    eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86,
    timerfd_gettime 287 87, signalfd 282 -, signalfd4 289 74, pause 34 -, nanosleep 35 101,
    clock_nanosleep 230 115, restart_syscall 219 128,
    # a pair of sockets of its own
    sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210,
    getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209,
    # processes and threads, which limits count
    fork 57 -, vfork 58 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
    getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121 155, getpgrp 111 -, getsid
    124 156, setpgid 109 154, setsid 112 157, set_tid_address 218 96, futex 202 98,
    futex_waitv 449 449, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293,
    sched_yield 24 124, arch_prctl 158 -, getcpu 309 168,
    # signals, which stay inside
    kill 62 129, tkill 200 130, tgkill 234 131, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130
    133, sigaltstack 131 132, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create
    222 107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109,
    timer_delete 226 111,
    # asking
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158,
    getresuid 118 148, getresgid 120 150, uname 63 160, sysinfo 99 179, times 100 153, time
    201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, getrandom 318
    278, getrusage 98 165, getrlimit 97 163, getpriority 140 141, sched_getaffinity 204 123,
    sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, sched_rr_get_interval 148 127, capget 125 90,
    # limits of its own, which only go down
    setrlimit 160 164
"""
"""By what each is for."""

_CHECKED = """
    clone 56 220, prlimit64 302 261, setpriority 141 140, sched_setaffinity 203 122,
    sched_setscheduler 144 119, sched_setparam 142 118, ioctl 16 29, prctl 157 167, fcntl 72
    25, socketpair 53 199
"""
"""Allowed with some arguments only; see `seccomp`."""

_IGNORED = """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54
"""
"""Done by nobody, though they seem to succeed: Landlock does not judge them, and a program that is
the user who started it would change the modes of what is that user's anywhere."""

_OTHER = """
    execve 59 221, clone3 435 435
"""
"""To start a program; and a second way to start a process, whose arguments no filter can see."""

LAST_KNOWN = 450
"""Calls with higher numbers are newer than this list: programs expect not to have them."""


def allowed() -> list[int]:
    """Return the numbers of the calls that are allowed whatever their arguments."""
    return sorted(_numbers(_ALLOWED).values())


def ignored() -> list[int]:
    """Return the numbers of the calls that do nothing and say that they did."""
    return sorted(_numbers(_IGNORED).values())


def checked() -> dict[str, int]:
    """Return name -> number of the calls whose arguments are looked at, and of the two others."""
    return _numbers(_CHECKED) | _numbers(_OTHER)


def _numbers(table: str) -> dict[str, int]:
    column = {"x86_64": 1, "aarch64": 2}[kernel.machine()]
    lines = (line for line in table.splitlines() if not line.lstrip().startswith("#"))
    rows = (row.split() for row in " ".join(lines).split(",") if row.strip())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
