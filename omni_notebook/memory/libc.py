"""The few C library calls that Python has no module for: mmap at a chosen protection, pread to an address, and others.

All calls release the interpreter lock. Errors become `OSError` with the errno of the call.
"""

from __future__ import annotations

import ctypes
import errno
import os

PROT_NONE = 0
PROT_READ = 1
PROT_WRITE = 2
MAP_PRIVATE = 0x02
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MADV_DONTNEED = 4
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_DONTNEED_LOCKED = 24  # Linux 5.18

# asm-generic and x86 agree on all of the above; the number of userfaultfd(2) differs.
_NR_USERFAULTFD = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "ppc64le": 364, "s390x": 355}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
_libc.syscall.restype = ctypes.c_long

_MAP_FAILED = ctypes.c_void_p(-1).value


_M_ARENA_MAX = -8
HEAPS_VARIABLE, HEAPS = "MALLOC_ARENA_MAX", 2
"""glibc gives each thread a heap of its own, up to eight a processor, and what was freed in one stays in it: a process
of several threads would hold ever more. Source: mallopt(3), M_ARENA_MAX."""


def limit_heaps() -> None:
    """Have this process's later threads share `HEAPS` heaps, unless the user has said how many, or libc can not."""
    if HEAPS_VARIABLE not in os.environ and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, HEAPS)


def _failed(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def reserve(n_bytes: int) -> int:
    """Reserve `n_bytes` of address space that nothing can touch; its address.

    Raises:
        OSError: ENOMEM, the address space is used up or limited (`RLIMIT_AS`). Source: mmap(2).
    """
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    address = _libc.mmap(None, n_bytes, PROT_NONE, flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise _failed("mmap")  # noqa: EM101 - the name of the call
    return int(address)


def map_private(fd: int, n_bytes: int) -> int:
    """Map a file's first `n_bytes` readable, and writable without touching the file; the address.

    Raises:
        OSError: ENOMEM, no address space. Source: mmap(2).
    """
    address = _libc.mmap(None, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise _failed("mmap")  # noqa: EM101 - the name of the call
    return int(address)


def unmap(address: int, n_bytes: int) -> None:
    """Give address space back. Source: munmap(2)."""
    if _libc.munmap(address, n_bytes):
        raise _failed("munmap")  # noqa: EM101 - the name of the call


def protect(address: int, n_bytes: int, protection: int) -> None:
    """Set what may be done with a range. Source: mprotect(2)."""
    if _libc.mprotect(address, n_bytes, protection):
        raise _failed("mprotect")  # noqa: EM101 - the name of the call


def advise(address: int, n_bytes: int, advice: int) -> None:
    """Tell the kernel what a page-aligned range is for. Source: madvise(2)."""
    if _libc.madvise(address, n_bytes, advice):
        raise _failed("madvise")  # noqa: EM101 - the name of the call


def read_at(fd: int, address: int, n_bytes: int, offset: int) -> int:
    """Read a file's bytes from `offset` on to an address; how many came, 0 at its end. Source: pread(2)."""
    while (got := int(_libc.pread(fd, address, n_bytes, offset))) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failed("pread")  # noqa: EM101 - the name of the call
    return got


def ioctl(fd: int, request: int, argument: ctypes.Array[ctypes.c_uint64]) -> int:
    """Ask a file's driver, with an array of 64-bit words as its structure (read and written).

    Source: ioctl(2).
    """
    result: int = _libc.ioctl(fd, request, ctypes.addressof(argument))
    if result < 0:
        raise _failed("ioctl")  # noqa: EM101 - the name of the call
    return result


def userfaultfd(flags: int) -> int:
    """A file descriptor that page faults are managed through.

    Raises:
        OSError: ENOSYS or EPERM where the kernel or a sandbox does not allow it. Source: userfaultfd(2).
    """
    number = _NR_USERFAULTFD.get(os.uname().machine)
    if number is None:
        msg = f"userfaultfd: its number is not known for {os.uname().machine}"
        raise OSError(38, msg)
    fd: int = _libc.syscall(number, flags)
    if fd < 0:
        raise _failed("userfaultfd")  # noqa: EM101 - the name of the call
    return fd
