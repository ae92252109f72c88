"""RewardService."""

import json

import grpc
from google.protobuf.struct_pb2 import Struct
from quartet.v1 import reward_pb2 as pb

from quartet_contract.cases import Bad, Case, Good, NoBadInput, Refused, has

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def verifier(name="exact", **parameters) -> pb.VerifierSpec:
    values = Struct()
    values.update(parameters)
    return pb.VerifierSpec(name=name, parameters=values)


def item(name="a", completion="42", answer="42", *verifiers) -> pb.ScoreItem:
    return pb.ScoreItem(
        item_id=name,
        completion=completion,
        reference=pb.Reference(answer=answer),
        verifiers=verifiers or [verifier(correct_reward=1.0)],
    )


TAGS = verifier("think_answer_tags", correct_reward=2.0)
BATCH = [
    item("right", "42"),
    item("wrong", "41"),
    item("worked", "<think>half of 1</think><answer>0.5</answer>", "\\frac{1}{2}", TAGS),
    item("formless", "0.5", "\\frac{1}{2}", TAGS),
]


def outcomes_in_order(w, answer):
    assert [result.item_id for result in answer.results] == ["right", "wrong", "worked", "formless"]
    scores = [result.score for result in answer.results]
    assert [score.outcome for score in scores] == [
        pb.OUTCOME_CORRECT,
        pb.OUTCOME_INCORRECT,
        pb.OUTCOME_CORRECT,
        pb.OUTCOME_MALFORMED,
    ]
    assert [score.reward for score in scores[:3]] == [1.0, 0.0, 2.0]
    assert [score.ans_acc for score in scores] == [1.0, 0.0, 1.0, 0.0]
    assert scores[3].format_acc == 0.0 and all(score.reason for score in scores)
    assert [score.verifiers[0].name for score in scores] == ["exact", "exact", "think_answer_tags", "think_answer_tags"]


def each_answered(w, answers):
    scores = {answer.result.item_id: answer.result.score for answer in answers}
    assert set(scores) == {"right", "wrong", "worked", "formless"} and len(answers) == 4
    assert scores["worked"].reward == 2.0 and scores["wrong"].reward == 0.0


def bad_one_fails_alone(w, answers):
    results = {answer.result.item_id: answer.result for answer in answers}
    assert set(results) == {"unknown", "right"}
    failure = results["unknown"].failure
    assert failure.kind == pb.FAILURE_KIND_INVALID_ITEM and not failure.retryable and "no_such" in failure.message
    assert results["right"].score.reward == 1.0


def reference_is_unusable(w, answer):
    failure = answer.results[0].failure
    assert failure.kind == pb.FAILURE_KIND_BAD_REFERENCE and not failure.retryable and failure.message


def alphabetical_with_schemas(w, answer):
    names = [info.name for info in answer.verifiers]
    assert names == sorted(names) and {"boxed", "exact", "think_answer_tags"} <= set(names)
    for info in answer.verifiers:
        assert info.description and json.loads(info.parameters_schema)["type"] == "object"


def score(*items):
    return lambda w: pb.ScoreRequest(items=items)


def stream(*items):
    return lambda w: [pb.ScoreStreamRequest(item=each) for each in items]


CASES: dict[str, list[Case]] = {
    "RewardService.Score": [
        Good("a batch", score(*BATCH), outcomes_in_order, volatile=("elapsed",)),
        Refused("no reference to compare with", score(item(answer="")), reference_is_unusable),
        Bad("nothing", score(), INVALID, "items"),
        Bad("one id twice", score(item("a"), item("a")), INVALID, "items[1].item_id"),
        Bad(
            "an unknown verifier",
            score(item("a"), item("b", "42", "42", verifier("no_such"))),
            INVALID,
            "items[1].verifiers[0].name",
        ),
    ],
    "RewardService.ScoreStream": [
        Good("each as it completes", stream(*BATCH), each_answered),
        Refused(
            "an invalid item does not end the stream",
            stream(item("unknown", "42", "42", verifier("no_such")), item("right")),
            bad_one_fails_alone,
        ),
    ],
    "RewardService.ListVerifiers": [
        Good("all", lambda w: pb.ListVerifiersRequest(), alphabetical_with_schemas),
        NoBadInput("the request has no field, and the list is there in every state"),
    ],
    "RewardService.Execute": [
        Good(
            "a program that reads, prints and leaves",
            lambda w: pb.ExecuteRequest(
                source="import sys; print(int(input()) * 2); sys.stderr.write('so far'); sys.exit(3)", stdin="21\n"
            ),
            has(outcome=pb.EXECUTION_OUTCOME_EXITED, exit_code=3, stdout="42\n", stderr="so far"),
            volatile=("elapsed",),
        ),
        Bad("no source", lambda w: pb.ExecuteRequest(stdin="21"), INVALID, "source"),
    ],
}
