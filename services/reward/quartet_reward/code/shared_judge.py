"""A judge of many programs, one after the other: by tests that leave nothing behind that the next could find.

It takes what compares answers with data: test programs of the kind that `data_tests` tells, and cases of a function
without a checker. It is confined as every judge is, and judges as every judge does; all that differs is that it goes
on. After anything out of the ordinary (an answer that is none, a limit, the program's early end) it does not: then the
judgment ends the process, as it ends any judge's.

Descriptor 3 leads to the service, which is told when this process is `ready`. A packet brings two descriptors, of the
task and of the socket to the program. What a judge reports goes back, with the last word `again`, whether more may
come; or `declined`, if the task is not for it.
"""

import json
import os
import resource
import socket
import warnings
from typing import Any

from quartet_reward.code import data_tests, judge
from quartet_reward.code.report import REPORT_DESCRIPTOR, count_passed, tell
from quartet_reward.sandbox import messages

_MOST_GROWTH_KIB = 16 << 10
"""A judge that has become larger ends: what large answers leave in its memory is not the next program's to pay for."""


def main(payload: bytes) -> None:
    """Judge until the service closes its end. There is no payload."""
    service = socket.socket(fileno=judge.PEER_DESCRIPTOR)
    os.dup2(service.fileno(), REPORT_DESCRIPTOR)
    warnings.simplefilter("ignore")  # of tests that compile with one: there is no end to what may be written
    os.write(REPORT_DESCRIPTOR, b'{"ready": true}')
    first = _size()
    again = True
    while again:
        try:
            _, descriptors = messages.receive(service)
        except messages.Closed:
            return
        task = _read(descriptors[0])
        if not may_judge(task):
            os.write(REPORT_DESCRIPTOR, b'{"declined": true, "again": true}')
        else:
            count_passed(None)
            last = judge.last_word_on(task, descriptors[1])
            again = _size() - first <= _MOST_GROWTH_KIB
            tell(last, again)
        messages.close_all(descriptors)


def may_judge(task: dict[str, Any]) -> bool:
    """Tell whether judging leaves no trace: nobody's code is run for it."""
    if task["kind"] == "test_program":
        return data_tests.only_data(task["source"], task["entry_point"], task["strict"])
    return task["kind"] == "function_cases" and not task["checker"]


def _read(descriptor: int) -> dict[str, Any]:
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        return json.loads(file.read())


def _size() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
