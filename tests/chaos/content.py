"""What the stand-ins say instead of a model: completions, and the weights that they make, follow from the instance ids.

So whoever holds a group can tell whether it is the right one, and whether a checkpoint's weights are those of its ids.
"""

import hashlib
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, tensor_pb2

GROUP_SIZE = 2
NO_WEIGHTS = hashlib.sha256(b"no step trained").hexdigest()


def write_prompts(path: Path, count: int) -> None:
    """Write `count` problems with their answers, as [data] takes them."""
    lines = [json.dumps({"prompt": f"{n}+{n % 7}=?", "gt_answer": str(n + n % 7)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")


def instance_names(count: int) -> list[str]:
    return [f"pass-0/{n}" for n in range(count)]


def number_of(instance_id: str, salt: str = "") -> int:
    """Return a number that looks random, the same for the same instance."""
    return int.from_bytes(hashlib.blake2b(f"{salt}{instance_id}".encode(), digest_size=6).digest())


def is_right(instance_id: str, index: int) -> bool:
    """Tell whether a completion of an instance gives the right answer."""
    return number_of(instance_id, f"answer {index} ") % 2 == 0


def completions(instance: experience_pb2.PromptInstance) -> list[str]:
    right = int(instance.prompt.reference.answer)
    answers = [right if is_right(instance.instance_id, index) else right + 1 for index in range(GROUP_SIZE)]
    return [f"<think>{instance.prompt.text}</think><answer>{answer}</answer>" for answer in answers]


def tokens(instance_id: str) -> tensor_pb2.RaggedTensor:
    """Return the tokens of an instance's completions: some dozens each, not the same number for all."""
    chance = random.Random(number_of(instance_id, "tokens "))
    lengths = [chance.randrange(8, 40) for _ in range(GROUP_SIZE)]
    data = struct.pack(f"<{sum(lengths)}i", *(chance.randrange(50_000) for _ in range(sum(lengths))))
    return tensor_pb2.RaggedTensor(dtype=tensor_pb2.DTYPE_INT32, lengths=lengths, data=data)


def floats(values: Sequence[float]) -> tensor_pb2.Tensor:
    """Return numbers, one a completion, as a tensor. (Without numpy: a stand-in starts in half the time.)"""
    data = struct.pack(f"<{len(values)}f", *values)
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[len(values)], data=data)


def group(
    lease: broker_pb2.PromptLease, version: int, scores: Sequence[reward_pb2.Score], rollout_id: str
) -> experience_pb2.ExperienceGroup:
    """Return the finished group of a lease, with what the reward service said."""
    instance = lease.instance
    token_ids = tokens(instance.instance_id)
    tensors = experience_pb2.GroupTensors(
        completion_token_ids=token_ids,
        rewards=floats([score.reward for score in scores]),
        ans_acc=floats([score.ans_acc for score in scores]),
    )
    transcript = experience_pb2.GroupTranscript(
        instance=instance, prompt_text=instance.prompt.text, rollout_id=rollout_id
    )
    for index, (text, score) in enumerate(zip(completions(instance), scores, strict=True)):
        transcript.completions.add(index=index, text=text, score=score, tokens=token_ids.lengths[index])
    header = experience_pb2.GroupHeader(
        instance_id=instance.instance_id,
        purpose=instance.purpose,
        min_policy_version=version,
        max_policy_version=version,
        completions=GROUP_SIZE,
        completion_tokens=sum(token_ids.lengths),
        attempt=lease.attempt,
    )
    return experience_pb2.ExperienceGroup(
        header=header, tensors=tensors.SerializeToString(), transcript=transcript.SerializeToString()
    )


def fault_of(instance_id: str, found: experience_pb2.ExperienceGroup) -> str:
    """Return what is wrong with a group that is to be of `instance_id`; empty if nothing."""
    if found.header.instance_id != instance_id:
        return f"the group in the place of '{instance_id}' is of '{found.header.instance_id}'"
    tensors = experience_pb2.GroupTensors.FromString(found.tensors)
    if tensors.completion_token_ids != tokens(instance_id):
        return f"the tokens of '{instance_id}' are not those that were put"
    right = [float(is_right(instance_id, index)) for index in range(GROUP_SIZE)]
    if tensors.ans_acc != floats(right):
        return f"the reward service judged '{instance_id}' {tensors.ans_acc.data.hex()}; the truth is {right}"
    return ""


def train(weights: str, instance_ids: Sequence[str]) -> str:
    """Return the weights after a step: a digest of the weights before and the batch."""
    return hashlib.sha256("\n".join([weights, *instance_ids]).encode()).hexdigest()
