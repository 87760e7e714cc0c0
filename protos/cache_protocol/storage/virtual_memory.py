"""Address ranges of this process, and the file pages mapped in them.

Python's `mmap` neither takes nor returns an address, so this module calls the C library; no other
module does. File pages are mapped at another address by `mremap` with an old size of 0, see
mremap(2). That needs no second open, so the file may have no name any more. Linux only: elsewhere
every call raises `OSError`.

A huge page takes one entry of the page table instead of 512. The kernel uses that entry only if the
page is mapped at a multiple of its size, in the address range and in the file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache_protocol.storage.layout import Matrix

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_RANDOM, _MADV_WILLNEED, _MADV_DONTNEED, _MADV_COLLAPSE = 1, 3, 4, 25
_PROCESS_MADVISE = 440  # the number of the system call, on every kind of processor
_MOST_RANGES = 1024  # of one system call
_BLOCK_BYTES = 512  # in which getrusage(2) counts
_HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_FAILED = ctypes.c_void_p(-1).value
_POINTER, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


@functools.cache
def huge_page_bytes() -> int:
    """Size of a huge page, such as 2 MiB; the normal page size if there are none."""
    try:
        return int(_HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return mmap.PAGESIZE


class MappedFile:
    """A whole file, mapped read-only for the lifetime of this object.

    Args:
        handle: of the open file; you may close it afterwards.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, handle: int) -> None:
        self.size = os.fstat(handle).st_size
        self.start = _mmap(self.size, mmap.PROT_READ, mmap.MAP_SHARED, handle)
        _unmap_with(self, self.start, self.size)


class AddressRange:
    """A reserved range of addresses, in which files can be mapped.

    It lives as long as its views. Reading where no file is mapped crashes the process. A range of
    at least a huge page starts at a multiple of the huge page size.

    Args:
        size: in bytes.

    Raises:
        OSError: the process does not have so many free addresses.
    """

    def __init__(self, size: int) -> None:
        self.size = max(size, mmap.PAGESIZE)
        page = huge_page_bytes() if self.size >= huge_page_bytes() else mmap.PAGESIZE
        reserved = self.size + page - mmap.PAGESIZE
        start = _mmap(reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._unmapping = _unmap_with(self, start, reserved)
        self.start = -(-start // page) * page

    def map_file(self, at: int, file: MappedFile, offset: int, size: int) -> None:
        """Maps ``size`` bytes of a file at byte ``at`` of this range.

        Args:
            at, offset: in this range and in the file; multiples of the page size.

        Raises:
            OSError: this process has too many maps.
        """
        if at + size > self.size or offset + size > file.size:
            raise ValueError(
                f"{size} bytes, from {offset} of {file.size}, do not fit at {at} of {self.size}"
            )
        mremap = _c_function("mremap", _POINTER, _SIZE, _SIZE, _INT, _POINTER)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        try:
            _checked(mremap(file.start + offset, 0, size, flags, self.start + at), size)
        except OSError:
            # `mremap` may have left a hole that another map may take: so never unmap this range.
            self._unmapping.detach()
            raise

    def map_memory(self, at: int, size: int, data: npt.NDArray[np.uint8] | None) -> None:
        """Maps ``size`` bytes of memory at byte ``at`` of this range.

        Args:
            at: a multiple of the page size.
            data: to copy to the beginning; None: zeros, whose pages take no memory.

        Raises:
            OSError: this process has too many maps.
        """
        if at + size > self.size:
            raise ValueError(f"{size} bytes do not fit at {at} of {self.size}")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        start = _mmap(size, protection, flags, -1, self.start + at)
        if data is not None:
            ctypes.memmove(start, np.ascontiguousarray(data).ctypes.data, data.nbytes)

    def collapse(self, at: int, size: int) -> None:
        """Moves a part of this range into huge pages, in every process that maps its file.

        Contents and addresses stay the same. A concurrent read waits some milliseconds at most. See
        MADV_COLLAPSE in madvise(2).

        Args:
            at, size: multiples of the size of a huge page.

        Raises:
            OSError: EINVAL if the kernel cannot (before Linux 6.1, or without huge pages); others
                if it could not this time, for example without enough contiguous memory.
        """
        madvise = _c_function("madvise", _POINTER, _SIZE, _INT)
        if madvise(self.start + at, size, _MADV_COLLAPSE):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot make huge pages of {size} bytes: {os.strerror(code)}")

    def without_read_ahead(self) -> None:
        """Makes a read of a page that is on a disk bring this page alone."""
        madvise = _c_function("madvise", _POINTER, _SIZE, _INT)
        madvise(self.start, self.size, _MADV_RANDOM)  # parts without a map do no harm

    def rows(self, at: int, width: int, dtype: np.dtype[np.generic]) -> Matrix:
        """Everything from byte ``at`` on, as a read-only ``[rows, width]`` array."""
        count = (self.size - at) // (width * dtype.itemsize)
        return np.asarray(_View(self, self.start + at, (count, width), dtype))


class _View:
    """An array at an address, for numpy; keeps its owner alive."""

    def __init__(
        self, owner: object, address: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> None:
        self._owner = owner
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address, True),  # read-only
        }


def _mmap(size: int, protection: int, flags: int, handle: int, at: int | None = None) -> int:
    mmap_ = _c_function("mmap", _POINTER, _SIZE, _INT, _INT, _INT, _OFFSET)
    return _checked(mmap_(at, size, protection, flags, handle, 0), size)


def _unmap_with(owner: object, start: int, size: int) -> weakref.finalize[..., object]:
    """Unmaps the addresses when ``owner`` is collected, but not at exit."""
    unmapping = weakref.finalize(owner, _c_function("munmap", _POINTER, _SIZE), start, size)
    unmapping.atexit = False
    return unmapping


def _checked(address: int | None, size: int) -> int:
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")
    return address


@functools.cache
def _c_function(name: str, *arguments: Any) -> Any:
    try:
        return ctypes.CFUNCTYPE(_POINTER, *arguments, use_errno=True)((name, ctypes.CDLL(None)))
    except (AttributeError, OSError):
        raise OSError(errno.ENOSYS, f"this system has no {name}") from None


def bring(ranges: npt.NDArray[np.int64]) -> None:
    """Asks the kernel to read mapped pages from their disk, all at once, and waits for none.

    The disk then works on many reads at a time. Pages in memory cost some 100 ns each.

    Args:
        ranges: ``[ranges, 2]``: address and bytes; addresses are multiples of the page size.
    """
    call = _c_function("syscall", _OFFSET, _OFFSET, _POINTER, _SIZE, _OFFSET, _OFFSET)
    process = _handle_of(os.getpid())
    for at in range(0, len(ranges), _MOST_RANGES):
        some = np.ascontiguousarray(ranges[at : at + _MOST_RANGES])
        done = call(_PROCESS_MADVISE, process, some.ctypes.data, len(some), _MADV_WILLNEED, 0)
        if done != int(some[:, 1].sum()):  # an older kernel refuses it
            for address, size in some.tolist():
                bring_run(address, size)


def bring_run(address: int, size: int) -> None:
    """As `bring`, for one range; ``address`` is a multiple of the page size."""
    _c_function("madvise", _POINTER, _SIZE, _INT)(address, size, _MADV_WILLNEED)


@functools.cache
def _handle_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # refused by the calls that need it


def bytes_from_disk() -> int:
    """The bytes that this thread has made the kernel read from disks so far."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return max(usage.ru_inblock * _BLOCK_BYTES, usage.ru_majflt * mmap.PAGESIZE)


def forget_pages(start: int, size: int) -> None:
    """Takes pages of a read-only file map out of this process: the kernel may drop them then.

    The next read maps them again. Only whole pages inside of the range; see MADV_DONTNEED.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > first:
        _c_function("madvise", _POINTER, _SIZE, _INT)(first, stop - first, _MADV_DONTNEED)


def return_free_memory() -> None:
    """Gives the kernel what malloc keeps of freed memory; takes milliseconds.

    glibc keeps it in an arena for each few threads, and returns only the end of an arena.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(ctypes.c_size_t(0))
