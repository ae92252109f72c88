"""NCCL by its C interface: what a weight broadcast between two services needs, and no torch.

Functions and their arguments are those of NVIDIA's nccl.h (https://docs.nvidia.com/deeplearning/nccl). Memory is given
by its address, streams by their handle. A group is met as vLLM meets a trainer without a TCPStore: all ranks hold the
same unique id, initialise at once, and sum one float as a first operation.
"""

import ctypes
import functools
import os
import sys
import time
from pathlib import Path

UNIQUE_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclUint8, ncclFloat32, ncclSum
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclSuccess, ncclInProgress
_LOOK_SECONDS = 0.002


class NcclError(RuntimeError):
    """NCCL said no; the text is its own."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]  # noqa: RUF012 (ctypes wants it so)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14, the first release with one: later ones read as much as `size` says."""

    _fields_ = [  # noqa: RUF012 (ctypes wants it so)
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]

    @classmethod
    def not_blocking(cls) -> "_Config":
        """Calls return at once, and what they have begun is asked for: so it can be given up."""
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 2 * 10000 + 14 * 100, 0)


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

    def __init__(self, group_id: bytes, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Meet the other ranks: blocks until all are here, at most `timeout_seconds`; that is also how long each
        operation may take to get onto its stream. Raises NcclError, and then nothing is left of the attempt."""
        # vLLM runs without these buffers, and ranks must agree.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        self._timeout = timeout_seconds
        self._handle = ctypes.c_void_p()
        identity, config = _UniqueId.from_buffer_copy(group_id), _Config.not_blocking()
        handle = ctypes.byref(self._handle)
        result = _library().ncclCommInitRankConfig(handle, world_size, identity, rank, ctypes.byref(config))
        self._settle(
            result, f"rank {rank} did not meet all {world_size} ranks of its group: one has died or is cut off"
        )

    def sum_one(self, address: int, stream: int) -> None:
        """Sum one float32 over all ranks, in place: the first operation of a group."""
        arguments = (ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(1), _FLOAT32, _SUM)
        result = _library().ncclAllReduce(*arguments, self._handle, ctypes.c_void_p(stream))
        self._settle(result, "the first operation of the group did not begin")

    def broadcast(self, address: int, size: int, stream: int) -> None:
        """Put a broadcast of `size` bytes from rank 0, in place, on a CUDA stream. Raises NcclError."""
        arguments = (ctypes.c_void_p(address), ctypes.c_void_p(address), ctypes.c_size_t(size), _UINT8, 0)
        result = _library().ncclBroadcast(*arguments, self._handle, ctypes.c_void_p(stream))
        self._settle(result, "a broadcast did not begin")

    def abort(self) -> None:
        """End the group; what is under way on a stream ends with an error instead of never."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _check(_library().ncclCommAbort(handle))

    def _settle(self, result: int, otherwise: str) -> None:
        """Wait for the end of what a call has begun; at the deadline, and when it fails, abort and raise."""
        deadline, state = time.monotonic() + self._timeout, ctypes.c_int(result)
        try:
            while state.value == _IN_PROGRESS:
                if time.monotonic() > deadline:
                    raise NcclError(f"NCCL: {otherwise} (waited {self._timeout:g} s)")
                time.sleep(_LOOK_SECONDS)
                _check(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
            _check(state.value)
        except NcclError:
            self.abort()
            raise


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
