"""A worker process: compares answers, one at a time, until its input ends. `python -m quartet_reward.worker`.

It may be killed at any moment; it holds nothing that matters. Its standard input and output are frames:

    -> {"reference": "…", "answer": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "reference_read"}              from here on, only the answer can be what takes long
    <- {"event": "done", "equal": true, "by_text": false, "reason": "…"}
     | {"event": "bad_reference", "reason": "…"} | {"event": "out_of_memory"}
     | {"event": "failed", "reason": "…"}
"""

import argparse
import ctypes
import logging
import math
import os
import resource
import signal
import sys
from typing import BinaryIO

from quartet_reward import frames
from quartet_reward.equality_policy import EqualityPolicy

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Limit this process, load math-verify, say so, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then ends its workers
    output = _private_output()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from quartet_reward import math_compare  # noqa: F401  loaded before the limit counts, so that a start cannot fail on it

    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    _send(output, {"event": "ready"})
    while (request := _receive(sys.stdin.buffer)) is not None:
        _limit_cpu(request["cpu_seconds"])
        _send(output, _answer(request, output))
    return 0


def _answer(request: dict, output: BinaryIO) -> dict:
    from quartet_reward.math_compare import BadReference, compare

    policy = EqualityPolicy(**request.get("policy", {}))
    try:
        found = compare(
            request["reference"], request["answer"], lambda: _send(output, {"event": "reference_read"}), policy
        )
    except BadReference as bad:
        return {"event": "bad_reference", "reason": str(bad)}
    except MemoryError:
        return {"event": "out_of_memory"}
    except Exception as error:  # whatever sympy raises is told to the service, which decides
        return {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    return {"event": "done", "equal": found.equal, "by_text": found.by_text, "reason": found.reason}


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before the request was made


def _private_output() -> BinaryIO:
    """Move standard output aside, so that nothing that is printed can break a frame."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def _limit_cpu(seconds: float) -> None:
    """Let the kernel kill this process should the service not do so in time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _receive(source: BinaryIO) -> dict | None:
    header = source.read(frames.HEADER.size)
    if len(header) < frames.HEADER.size:
        return None
    return frames.unpack(source.read(frames.body_length(header)))


def _send(output: BinaryIO, message: dict) -> None:
    output.write(frames.pack(message))
    output.flush()


if __name__ == "__main__":
    sys.exit(main())
