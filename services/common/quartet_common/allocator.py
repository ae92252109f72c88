"""The C library's allocator, told to keep what was freed.

glibc gives memory above 128 KiB back to the system as soon as it is freed, and takes it anew for the next message, page
by page: touching a fresh page costs several times what copying into it costs. Messages of some hundred KiB are what a
service is made of here, so freed memory is kept for the next one.
"""

import ctypes
import os
import sys

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Larger blocks are still taken from the system and given back: 32 MiB is the most that glibc allows here.
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Keep freed memory in this process. False where there is no glibc, or MALLOC_* of the environment has its say."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
