"""Verification of plain numeric answers by the reward service, beside math-verify in one process.

Ours: a reward service process with one worker, asked over gRPC in batches of 128, one batch after the other, with the
`boxed` verifier. Plain numbers and fractions are compared as exact rationals, without its worker.

Peer: math-verify's parse of the completion and of the reference, and verify, in this process: what a training loop that
calls the library itself does. It is the library that the service uses for all that is not plain numbers.

The items are like GSM8K's: some words of working, a whole number or a decimal in the box, half of them wrong; made here
from a seed. Both must give the right verdict on each, or there is no figure.
"""

import random
import tempfile
from pathlib import Path

from math_verify import parse, verify
from measuring import Figure, in_turn, report, seconds_of, service
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.channel import connect_sync

BATCH = 128
BATCHES = 4
ROUNDS = 5


def make_items(count: int) -> list[tuple[reward_pb2.ScoreItem, bool]]:
    """Items, and whether each is right."""
    rng = random.Random(0)
    items = []
    for index in range(count):
        price, number = rng.randint(2, 400), rng.randint(2, 90)
        answer = price * number / rng.choice([1, 1, 1, 2, 4])
        right = rng.random() < 0.5
        told = answer if right else answer + rng.randint(1, 20)
        completion = (
            f"<think>There are {number} boxes and each costs {price} dollars, so I multiply and divide what is left "
            f"among them.</think>She pays {number} times {price}. The answer is \\boxed{{{told:,.8g}}}."
        )
        reference = reward_pb2.Reference(answer=f"{answer:.8g}")
        verifiers = [reward_pb2.VerifierSpec(name="boxed")]
        item = reward_pb2.ScoreItem(item_id=str(index), completion=completion, reference=reference, verifiers=verifiers)
        items.append((item, right))
    return items


def main() -> None:
    items = make_items(BATCH * BATCHES)
    requests = [
        reward_pb2.ScoreRequest(items=[item for item, _ in items[start : start + BATCH]])
        for start in range(0, len(items), BATCH)
    ]
    expected = [right for _, right in items]

    with (
        tempfile.TemporaryDirectory() as folder,
        service("reward", Path(folder), []) as address,
        connect_sync(address) as channel,
    ):
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        def ours() -> list[bool]:
            results = [result for request in requests for result in stub.Score(request, timeout=60).results]
            return [result.score.outcome == reward_pb2.OUTCOME_CORRECT for result in results]

        def peer() -> list[bool]:
            return [verify(parse(item.reference.answer), parse(item.completion)) for item, _ in items]

        for name, verdicts in (("the service", ours()), ("math-verify", peer())):
            wrong = sum(found != right for found, right in zip(verdicts, expected, strict=True))
            if wrong:
                raise RuntimeError(f"{name} judges {wrong} of {len(items)} items wrongly: there is nothing to compare")
        figures = in_turn(
            lambda: len(items) / seconds_of(ours), lambda: len(items) / seconds_of(peer), ROUNDS, warm_up=0
        )
    report(Figure("reward: plain numeric answers", "items/s", *figures, "math-verify in one process", "higher"))


if __name__ == "__main__":
    main()
