"""Converts what a process writes to standard error, other than its logs, to JSON records (cli.py starts it).

    python stderr_reader.py SERVICE INSTANCE <lines >failed-handshakes 2>log

Each line becomes a record, unless it is one already. gRPC's traces of handshakes are dropped; each failed handshake is
written to standard output as {"side", "peer", "reason"}. This is a separate process, so that the last lines before a
crash are not lost, and imports only what loads quickly.
"""

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

# gRPC's (1.85) lines about handshakes, with GRPC_TRACE=handshaker, and what follows when an error is shown.
_TRACE = re.compile(
    r"[IWE]\d{4} \S+ +\d+ (?:handshaker\.cc|channel_trace\.h|trace\.cc|ssl_transport_security\.cc):\d+\] "
    r"(?:handshake_manager|handshake manager|CallNextHandshakerLocked|gRPC Tracers|Handshake failed|No match found).*"
    r"| shutdown=(?:true|false) index=.*|=== Source Location Trace: ===.*|src/core/\S+:\d+.*|\s*"
)
_FAILED = re.compile(r"CallNextHandshakerLocked: error=(?!OK|UNAVAILABLE)(?P<reason>.*)")
_PEER = re.compile(r"endpoint_peer_address=([^,]*)")


def failed_handshakes(lines: Iterable[str], others: Any) -> Iterator[dict[str, str]]:
    """Yield failed handshakes; pass all lines that are not of gRPC's traces to `others`.

    A handshake whose peer disconnected (a port scan, a TCP probe) does not count as failed.
    """
    reason = ""
    for line in lines:
        if not _TRACE.fullmatch(line):
            others(line)
            continue
        if found := _FAILED.search(line):
            reason = found["reason"].removesuffix(": OK")
        if reason and (peer := _PEER.search(line)):
            side = "server" if "internal.server_credentials" in line else "client"
            yield {"side": side, "peer": peer[1], "reason": reason}
            reason = ""


def main(service: str, instance: str) -> None:
    """Read until the last process that can write has ended."""

    def write_record(line: str) -> None:
        record = _record(line)
        if not record:
            now = time.time()
            stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03}"
            who = {"service": service, "instance": instance}
            record = json.dumps({"time": stamp, "level": "WARNING", "logger": "stderr", "message": line, **who})
        sys.stderr.write(record + "\n")
        sys.stderr.flush()

    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    for failed in failed_handshakes((line.rstrip("\n") for line in sys.stdin), write_record):
        try:
            print(json.dumps(failed), flush=True)
        except BrokenPipeError:
            continue  # the process that counts the failures has ended


def _record(line: str) -> str:
    """Return a line that is already a record, in ASCII; empty if it is not."""
    try:
        return json.dumps(json.loads(line)) if line.startswith("{") else ""
    except (ValueError, RecursionError):
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
