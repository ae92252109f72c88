"""Judged execution rehearsed in the fork server, so that its children need not make again what a first time makes.

That is specialised instructions, caches of attributes, types that are ready: made by a child, each costs a copy of a
page of memory besides. The rehearsal runs this module's constant texts only, before the fork server knows of any job,
with both sides in one process.
"""

import socket
import sys
from typing import Any

from quartet_reward.code import assertions, candidate
from quartet_reward.code.channel import Channel
from quartet_reward.code.program import Program
from quartet_reward.code.rpc import Peer

_TIMES = 16
_SECONDS = 60.0
_PROGRAM = '''
from typing import List, Optional
import math


def total(numbers: List[int], factor: float = 1.0, *rest, **named) -> Optional[dict]:
    """Texts like those that models write: what compiles them is rehearsed too."""
    found = {}
    for index, each in enumerate(sorted(numbers, key=lambda each: -each)):
        if each % 2 == 0 and index >= 0:
            found[str(each)] = found.get(str(each), 0) + each * factor
        else:
            found["odd"] = [one for one in range(each) if one not in (1, 2)]
    try:
        found["text"] = " ".join("a-b c".split("-"))[::-1].upper() + f"{math.sqrt(4):.1f}"
    except (ValueError, KeyError) as error:
        raise TypeError(str(error)) from error
    while len(found) > 100:
        found.popitem()
    return found
'''
_TEST = """
METADATA = {"author": "nobody", "dataset": "test"}


def check(candidate):
    assert candidate([2, 3]) == {"odd": [0], "2": 2.0, "text": "C B A2.0"}
    assert candidate([4], 2.0)["4"] == 8.0, "a message"
    assert abs(candidate([2, 4, 6])["6"] - 6.0) < 1e-6
    assert candidate([], 1.5) != (1, [2], {3: "x"}, None, True)
    for each in ([1, 2], [5]):
        assert isinstance(candidate(each), dict)
"""


def rehearse() -> None:
    """Judge a constant program by a constant test, several times. Descriptor 4 leads nowhere."""
    for _ in range(_TIMES):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            peer = candidate.serve({"source": _PROGRAM, "usual_imports": False}, Channel(theirs.fileno()))
            assert peer is not None, "the constant program compiles"
            program = Program(_SECONDS, _SECONDS, _InTurn(ours.fileno(), peer), strict=True)
            assertions.judge(program, _TEST, "total", prefix="")
    sys.modules.pop(candidate.MODULE)


class _InTurn(Channel):
    """The judge's channel: before it waits, the program's side does what it was asked."""

    def __init__(self, descriptor: int, other: Peer):
        super().__init__(descriptor)
        self._other = other
        self._asked = False

    def send(self, message: dict[str, Any]) -> None:
        super().send(message)
        self._asked = True

    def receive(self) -> dict[str, Any]:
        if self._asked:
            self._asked = False
            self._other.serve_one()
        return super().receive()
