"""Items for the tests."""

from typing import Any

from google.protobuf.struct_pb2 import Struct
from quartet.v1 import reward_pb2

# Of the services and pools under test.
DEADLINE_SECONDS = 3.0

# Evaluating it would take longer than anyone waits: math-verify's own alarm does not always stop such answers.
ENDLESS = "(10^{9})!"


def spec(name: str, weight: float = 0.0, **parameters: Any) -> reward_pb2.VerifierSpec:
    """A verifier with its parameters."""
    struct = Struct()
    struct.update(parameters)
    return reward_pb2.VerifierSpec(name=name, weight=weight, parameters=struct)


def item(
    completion: str, answer: str = "8", verifier: str = "think_answer_tags", item_id: str = "a", **fields: Any
) -> reward_pb2.ScoreItem:
    """An item with one verifier without parameters, unless `verifiers` gives others."""
    fields.setdefault("verifiers", [spec(verifier)])
    return reward_pb2.ScoreItem(
        item_id=item_id, completion=completion, reference=reward_pb2.Reference(answer=answer), **fields
    )


def tagged(answer: str, thought: str = "2+3=5") -> str:
    """A completion in the form of think_answer_tags."""
    return f"<think>{thought}</think><answer>{answer}</answer>"


def hard(number: int = 1, **fields: Any) -> reward_pb2.ScoreItem:
    """A right answer that only a worker can compare with its reference; each number's is another."""
    shift = number + 1
    return item(tagged(rf"\frac{{x}}{{x+{shift}}}"), rf"1-\frac{{{shift}}}{{x+{shift}}}", **fields)
