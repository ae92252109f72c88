"""The stand-ins' completions and weights, which are derived from the instance ids.

A check can therefore tell whether a group has the right content, and a checkpoint the weights of its ledger.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_contract.world import put_group

GROUP_SIZE = 2
NO_WEIGHTS = hashlib.sha256(b"no step trained").hexdigest()


def write_prompts(path: Path, count: int) -> None:
    """Write `count` problems with their answers in the format of [data]."""
    lines = [json.dumps({"prompt": f"{n}+{n % 7}=?", "gt_answer": str(n + n % 7)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


def instance_names(count: int) -> list[str]:
    return [f"pass-0/{n}" for n in range(count)]


def number_of(instance_id: str, salt: str = "") -> int:
    """Return a pseudo-random number determined by the instance id."""
    return int.from_bytes(hashlib.blake2b(f"{salt}{instance_id}".encode(), digest_size=6).digest())


def is_right(instance_id: str, index: int) -> bool:
    """Return whether a completion of an instance gives the right answer."""
    return number_of(instance_id, f"answer {index} ") % 2 == 0


def completions(instance: experience_pb2.PromptInstance) -> list[str]:
    right = int(instance.prompt.reference.answer)
    answers = [right if is_right(instance.instance_id, index) else right + 1 for index in range(GROUP_SIZE)]
    return [f"<think>{instance.prompt.text}</think><answer>{answer}</answer>" for answer in answers]


def tensors(instance_id: str, answers: Sequence[float]) -> bytes:
    """Return stand-ins for a group's tensors, which the broker does not parse: instance id and accuracies."""
    said = json.dumps([instance_id, *answers]).encode()
    return said.ljust(200 + number_of(instance_id, "length ") % 300)


def group(lease: broker_pb2.PromptLease, version: int, scores: Sequence[reward_pb2.Score]) -> broker_pb2.PutGroup:
    """Return the finished group of a lease, with the reward service's scores."""
    return put_group(lease, version, tensors(lease.instance.instance_id, [score.ans_acc for score in scores]))


def fault_of(instance_id: str, found: experience_pb2.ExperienceGroup) -> str:
    """Return why a group is not that of `instance_id`; empty if it is."""
    if found.header.instance_id != instance_id:
        return f"the group in the place of '{instance_id}' is of '{found.header.instance_id}'"
    truth = tensors(instance_id, [float(is_right(instance_id, index)) for index in range(GROUP_SIZE)])
    return "" if found.tensors == truth else f"'{instance_id}' was put as {truth!r}, and came as {found.tensors!r}"


def train(weights: str, instance_ids: Sequence[str]) -> str:
    """Return the weights after a step: a digest of the weights before and the batch."""
    return hashlib.sha256("\n".join([weights, *instance_ids]).encode()).hexdigest()
