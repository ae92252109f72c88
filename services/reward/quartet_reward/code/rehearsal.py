"""A test program read in the fork server, before it knows of any job.

What Python makes at a first time (specialized instructions, caches of attributes, types that are ready) each judge
would make again, and copy a page of memory for it. Only the constant text of this module is read.
"""

from quartet_reward.code.marked import mark
from quartet_reward.code.names import read_names

_TEST = """
def check(candidate):
    assert candidate([2, 3], 2.0) == {"2": 4.0, "3": 6.0}, "a message"
    for each in ([1, 2], [5]):
        assert abs(candidate(each)[str(each[0])] - each[0]) < 1e-6
"""


def rehearse() -> None:
    """Do what a judge does before it calls the program."""
    for _ in range(16):  # instructions are specialized after eight
        mark(_TEST, "<test>")
        read_names(_TEST, "<test>", "total")
