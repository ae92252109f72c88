"""NCCL by its C interface: what a weight broadcast between two services needs, and no torch.

Functions and their arguments are those of NVIDIA's nccl.h (https://docs.nvidia.com/deeplearning/nccl). Memory is given
by its address, streams by their handle. A group is met as vLLM meets a trainer without a TCPStore: all ranks hold the
same unique id, initialise at once, and sum one float as a first operation.
"""

import ctypes
import functools
import os
import sys
from pathlib import Path

UNIQUE_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclUint8, ncclFloat32, ncclSum
_SUCCESS = 0


class NcclError(RuntimeError):
    """NCCL said no; the text is its own."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]  # noqa: RUF012 (ctypes wants it so)


def why_not() -> str:
    """Return why NCCL cannot be used in this process, in one sentence, or nothing."""
    if not _gpus():
        return "there is no CUDA GPU on this machine: use the transport gloo or file"
    try:
        _library()
    except OSError as error:
        return f"libnccl cannot be loaded ({error}): install the nvidia-nccl wheel that this torch names"
    return ""


def version() -> str:
    """Return the library's version, e.g. "2.27.3". Raises OSError without a library."""
    number = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(number)))
    return f"{number.value // 10000}.{number.value % 10000 // 100}.{number.value % 100}"


def unique_id() -> bytes:
    """Return a new group's id, 128 bytes, for all of its ranks. Raises NcclError."""
    made = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


class Communicator:
    """One rank of a group, on the current CUDA device."""

    def __init__(self, group_id: bytes, rank: int, world_size: int) -> None:
        """Meet the other ranks: blocks until all are here, without a deadline. Raises NcclError."""
        # vLLM runs without these buffers, and ranks must agree.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        self._handle = ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(group_id)
        _check(_library().ncclCommInitRank(ctypes.byref(self._handle), world_size, identity, rank))

    def sum_one(self, address: int, stream: int) -> None:
        """Sum one float32 over all ranks, in place: the first operation of a group."""
        arguments = (ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(1), _FLOAT32, _SUM)
        _check(_library().ncclAllReduce(*arguments, self._handle, ctypes.c_void_p(stream)))

    def broadcast(self, address: int, size: int, stream: int) -> None:
        """Put a broadcast of `size` bytes from rank 0, in place, on a CUDA stream. Raises NcclError."""
        arguments = (ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(size), _UINT8, 0)
        _check(_library().ncclBroadcast(*arguments, self._handle, ctypes.c_void_p(stream)))

    def abort(self) -> None:
        """End the group; what is under way on a stream ends with an error instead of never."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _check(_library().ncclCommAbort(handle))


@functools.cache
def _gpus() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) != _SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return 0
    return count.value


@functools.cache
def _library() -> ctypes.CDLL:
    """Load libnccl: the one that torch has loaded or brings, else the system's."""
    wheels = (Path(folder) / "nvidia" / "nccl" / "lib" / "libnccl.so.2" for folder in sys.path)
    path = next((str(wheel) for wheel in wheels if wheel.is_file()), "libnccl.so.2")
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(result: int) -> None:
    if result != _SUCCESS:
        raise NcclError(f"NCCL: {_library().ncclGetErrorString(result).decode()}")
