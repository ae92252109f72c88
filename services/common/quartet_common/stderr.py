"""Standard error of a service that logs JSON: every line of it becomes a record, and failed TLS handshakes are counted.

Libraries, child processes and gRPC itself write there. `watched_stderr` has a process (stderr_reader.py) read it.
"""

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from quartet_common import metrics
from quartet_common.log import get_logger
from quartet_common.text import Repeats

log = get_logger(__name__)

_FAILED = metrics.counter(
    "quartet_tls_handshakes_failed_total",
    "TLS handshakes that failed, by which end this process was and why (no_certificate, certificate, not_tls, other)",
    ["side", "reason"],
)
# So that a library that writes much at once, while it holds Python's lock, does not wait.
_PIPE_BYTES = 1 << 20
_READER_SECONDS = 2.0
_CAUSES = (
    ("no_certificate", re.compile("PEER_DID_NOT_RETURN_A_CERTIFICATE")),
    ("not_tls", re.compile("WRONG_VERSION_NUMBER|HTTP_REQUEST|UNSUPPORTED_PROTOCOL")),
    ("certificate", re.compile("certificate|Verification|BAD_SIGNATURE|UNKNOWN_CA", re.IGNORECASE)),
)


@contextmanager
def watched_stderr(service: str, instance: str) -> Iterator[None]:
    """Have all that is written to standard error pass a reader; logs go past it, to where it was."""
    read, write = os.pipe()
    with suppress(OSError):  # a user may have no more of such memory
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    original = os.dup(2)
    reader = str(Path(__file__).with_name("stderr_reader.py"))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reader, service, instance],
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=original,
        text=True,
        start_new_session=True,  # it ends after the last who writes, not with a signal to the group
    )
    os.close(read)
    os.dup2(write, 2)
    os.close(write)
    direct = os.fdopen(original, "w", buffering=1, errors="backslashreplace")
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    for handler in handlers:
        handler.setStream(direct)
    if process.stdout is not None:
        threading.Thread(target=_count_failures, args=(process.stdout,), name="handshakes", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        for handler in handlers:
            handler.setStream(sys.stderr)
        # A child that lives on keeps it, and its lines, alive.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_READER_SECONDS)


def _count_failures(lines: IO[str]) -> None:
    repeats = Repeats()
    for line in lines:
        failed = json.loads(line)
        cause = next((name for name, pattern in _CAUSES if pattern.search(failed["reason"])), "other")
        _FAILED.labels(failed["side"], cause).inc()
        host = failed["peer"].rpartition(":")[0]
        if (repeated := repeats.count((failed["side"], host, cause))) is not None:
            extra = {**failed, "cause": cause, "repeated": repeated}
            log.warning("TLS handshake failed: %s", failed["reason"], extra=extra)
