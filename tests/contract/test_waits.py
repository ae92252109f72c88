"""Calls that wait: as long as they were told, and no longer than for what they wait.

What ends each wait is the broker's own tests' to show.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc

from quartet_common.durations import to_duration
from quartet_contract.calls import SECONDS
from quartet_contract.world import SERVE, World

SLACK = 20.0
"""Seconds a loaded machine may add."""


@pytest.fixture
def run(stack):
    """Return a run at the broker."""
    return World(stack.callers()).run()


def lease_prompts(run, seconds):
    return "LeasePrompts", run.wait(seconds)


def lease_experience(run, seconds):
    run.open()
    return "LeaseExperience", pb.LeaseExperienceRequest(
        run_id=run.id, session_epoch=run.session, step=0, wait=to_duration(seconds)
    )


def get_evaluation(run, seconds):
    run.evaluation()
    return "GetEvaluation", pb.GetEvaluationRequest(run_id=run.id, evaluation_id="heldout@0", wait=to_duration(seconds))


def has_nothing(answer) -> bool:
    if isinstance(answer, list):
        return not answer[0].manifest.granted
    return not answer.complete if isinstance(answer, pb.GetEvaluationResponse) else not answer.leases


@pytest.mark.parametrize("make", [lease_prompts, lease_experience, get_evaluation])
@pytest.mark.parametrize("seconds", [0, 0.5])
def test_it_waits_as_long_as_asked(run, make, seconds):
    rpc, request = make(run, seconds)
    began = time.monotonic()
    assert has_nothing(run.call(rpc, request))
    assert 0.9 * seconds < time.monotonic() - began < seconds + SLACK


def test_a_run_that_is_finished_while_prompts_are_awaited_ends_the_wait(run):
    with waiting(run, *lease_prompts(run, 30)) as answers:
        run.finish()
    assert not answers[0].leases and answers[0].gate == pb.GATE_REASON_FINISHED


def test_collect_results_answers_as_groups_are_finished(stack, run):
    run.submit("s1", "s2", purpose=SERVE)
    stub = broker_pb2_grpc.BrokerServiceStub(stack.callers()["BrokerService"].channel)
    stream = stub.CollectResults(pb.CollectResultsRequest(run_id=run.id, instance_ids=["s1", "s2"]), timeout=SECONDS)
    first, second = run.lease(2)
    run.put([second])
    assert next(stream).instance_id == second.instance.instance_id
    run.put([first])
    assert [answer.instance_id for answer in stream] == [first.instance.instance_id]


@contextmanager
def waiting(run, rpc: str, request) -> Iterator[list]:
    """Have a call wait meanwhile; its answer is there afterwards."""
    answers = []
    call = threading.Thread(target=lambda: answers.append(run.call(rpc, request)))
    call.start()
    call.join(0.2)
    assert call.is_alive()
    yield answers
    call.join(SLACK)
    assert answers
