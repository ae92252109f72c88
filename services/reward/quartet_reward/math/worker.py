"""A worker process: compares answers, one at a time, until its input ends. `python -m quartet_reward.math.worker`.

It may be killed at any moment; it holds nothing that matters. Its standard input and output are frames:

    -> {"reference": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "judged", "is_text": false} | {"event": "bad_reference", "reason": "…"}

    -> {"reference": "…", "answer": "…", "policy": {…}, "cpu_seconds": 10}
    <- {"event": "done", "equal": true}

    <- {"event": "out_of_memory"} | {"event": "failed", "reason": "…"}      to either
"""

import argparse
import logging
import math
import resource
import sys

from quartet_reward.math.compare import EqualityPolicy
from quartet_reward.workers import protocol

_NICE = 5  # as a sandbox's programs: a hostile answer keeps a processor busy to its deadline, while services answer


def main() -> int:
    """Limit this process, load math-verify, say so, and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    output = protocol.begin(arguments.parent, _NICE)
    from quartet_reward.math import symbolic

    logging.disable(logging.WARNING)
    symbolic.warm_up()
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    protocol.send(output, {"event": "ready"})
    while (request := protocol.receive()) is not None:
        _limit_cpu(request["cpu_seconds"])
        protocol.send(output, _answer(request))
    return 0


def _answer(request: dict) -> dict:
    from quartet_reward.math.symbolic import BadReference, compare, judge_reference

    policy = EqualityPolicy(**request.get("policy", {}))
    try:
        if "answer" in request:
            return {"event": "done", "equal": compare(request["reference"], request["answer"], policy)}
        return {"event": "judged", "is_text": not judge_reference(request["reference"], policy)}
    except BadReference as bad:
        return {"event": "bad_reference", "reason": str(bad)}
    except MemoryError:
        return {"event": "out_of_memory"}
    except Exception as error:  # whatever sympy raises is told to the service, which decides
        return {"event": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}


def _limit_cpu(seconds: float) -> None:
    """Let the kernel kill this process should the service not do so in time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
