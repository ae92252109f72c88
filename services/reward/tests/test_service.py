"""RewardService over a real socket, good and bad input."""

import asyncio
import os
import signal

import grpc
import pytest
from quartet.v1 import reward_pb2
from reward_samples import ENDLESS, hard, item, serving, spec, tagged, until

from quartet_common.errors import describe, retry_delay

TIMEOUT = 60.0


async def score(service, *items, timeout: float = TIMEOUT):
    response = await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=timeout)
    return list(response.results)


async def refused(service, *items) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, *items)
    return caught.value.code(), describe(caught.value)


def requests(*items):
    return [reward_pb2.ScoreStreamRequest(item=one) for one in items]


def bad(verifier: str = "boxed", **fields) -> reward_pb2.ScoreItem:
    return item("8", verifiers=[spec(verifier, **fields)])


async def test_a_bad_reference_is_the_failure_of_its_item_alone(service):
    items = {
        "right by algebra": item(tagged(r"\sqrt{64}")),
        "no reference": item(tagged("8"), answer=""),
        "bad reference": item(tagged("8"), answer=r"\frac{1}{"),
        "other": item(r"\boxed{8}", verifiers=[spec("boxed", correct_reward=1.0)]),
    }
    for name, one in items.items():
        one.item_id = name
    results = await score(service, *items.values())
    assert [result.item_id for result in results] == list(items)
    right, *bad, other = results
    assert (right.score.reward, other.score.reward) == (10.0, 1.0)
    assert right.score.outcome == reward_pb2.OUTCOME_CORRECT and right.score.format_acc == right.score.ans_acc == 1.0
    assert right.score.parsed_answer == r"\sqrt{64}" and right.score.reason and right.score.elapsed.ToNanoseconds() > 0
    for each in bad:
        assert each.failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and not each.failure.retryable
        assert "reference" in each.failure.message


async def test_verifiers_are_weighed_and_summed(service):
    one = item(
        tagged("9"),
        completion_tokens=95,
        verifiers=[
            spec("length", weight=0.5, penalty=1.0, max_tokens=100, buffer_tokens=10),
            spec("format", reward=2.0),
            spec("think_answer_tags", weight=3.0),
            spec("exact", weight=1.0, answer_in="answer_tags"),
        ],
    )
    (result,) = await score(service, one)
    assert result.score.reward == pytest.approx(0.5 * -0.5 + 2.0)
    assert result.score.outcome == reward_pb2.OUTCOME_INCORRECT  # of think_answer_tags: the first to judge answers
    assert result.score.format_acc == 1.0 and result.score.ans_acc == 0.0
    assert [part.name for part in result.score.verifiers] == ["length", "format", "think_answer_tags", "exact"]
    assert [part.reward for part in result.score.verifiers] == [-0.5, 2.0, 0.0, 0.0]
    assert not any(part.tests or part.HasField("tests_passed") for part in result.score.verifiers)


@pytest.mark.parametrize(
    ("one", "field", "allowed"),
    [
        (item("8", verifier="boxd"), "items[0].verifiers[0].name", "did you mean 'boxed'"),
        (item("8", item_id="a" * 257), "items[0].item_id", "1 to 256"),
        (bad(reward=1), "items[0].verifiers[0].parameters.reward", "correct_reward, string_match_reward"),
        (bad(weight=float("nan")), "items[0].verifiers[0].weight", "finite"),
        (bad(correct_reward=float("nan")), "items[0].verifiers[0].parameters.correct_reward", "got nan; allowed: a f"),
    ],
)
async def test_bad_items_are_refused_by_field(service, one, field, allowed):
    code, sentence = await refused(service, one)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith(field + ":") and allowed in sentence


async def kill_busy_workers(service, times: int) -> None:
    for _ in range(times):
        await until(lambda: service.pool.busy == 1)
        (pid,) = service.pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: pid not in service.pool.pids)


async def test_a_stream_answers_each_item_as_it_completes(service):
    await score(service, hard(101))  # a worker is there
    call = service.stub.ScoreStream(timeout=TIMEOUT)
    await call.write(requests(item(tagged(ENDLESS), item_id="slow"))[0])
    for i in range(100):  # they do not queue behind the slow one
        await call.write(requests(item(tagged("8"), item_id=f"quick-{i}"))[0])
        assert (await call.read()).result.item_id == f"quick-{i}"
    await call.done_writing()
    await kill_busy_workers(service, 2)
    slow = (await call.read()).result
    assert slow.item_id == "slow" and slow.failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("ends", ["cancelled", "cancelled stream", "deadline"])
async def test_a_call_that_ends_early_kills_its_work(service, ends):
    await score(service, hard(102))
    (victim,) = service.pool.pids
    request = reward_pb2.ScoreRequest(items=[item(tagged(ENDLESS))])
    if ends == "cancelled stream":
        call = service.stub.ScoreStream(timeout=TIMEOUT)
        await call.write(requests(*request.items)[0])
    else:
        call = service.stub.Score(request, timeout=TIMEOUT if ends == "cancelled" else 3.0)
    await until(lambda: service.pool.busy == 1)
    if ends == "deadline":
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        call.cancel()
    await until(lambda: not os.path.exists(f"/proc/{victim}"))
    assert service.pool.waiting == service.pool.busy == 0
    (result,) = await score(service, hard(77))
    assert result.score.reward == 10.0


async def test_a_full_queue_says_when_to_come_back_and_plain_numbers_pass(service):
    slow = [hard(i, item_id=str(i)) for i in range(1023)]
    first = asyncio.create_task(score(service, item(tagged(ENDLESS)), *slow))
    await until(lambda: service.pool.waiting == 1023)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, hard(103))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(caught.value) > 0
    (quick,) = await score(service, item(tagged("8")))
    assert quick.score.reward == 10.0
    first.cancel()
    await until(lambda: service.pool.waiting == service.pool.busy == 0)
    (result,) = await score(service, hard(104))
    assert result.score.reward == 10.0


async def test_what_is_not_done_at_the_end_is_told(service):
    await score(service, hard(105))
    call = service.stub.ScoreStream(timeout=TIMEOUT)
    await call.write(requests(item(tagged(ENDLESS), item_id="long"))[0])
    await until(lambda: service.pool.busy == 1)
    draining = asyncio.create_task(service.host.drain())
    result = (await call.read()).result
    assert result.item_id == "long" and result.failure.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN
    assert result.failure.retryable
    await draining


async def test_a_flood_of_one_run_does_not_keep_another_waiting(service):
    await score(service, hard(106))
    (worker,) = service.pool.pids
    os.kill(worker, signal.SIGSTOP)
    # More than the room's half, which is what one run may have: the stream is not read to its end.
    many = (requests(hard(i, item_id=str(i), run_id="flood"))[0] for i in range(600))
    flood = service.stub.ScoreStream(many, timeout=TIMEOUT)
    await until(lambda: service.pool.waiting == 511)
    os.kill(worker, signal.SIGCONT)
    # Half of its questions are among the flood's: those do not have to wait for the flood's turn either.
    small = [hard(i, item_id=str(i), run_id="small") for i in (*range(400, 405), *range(5000, 5005))]
    results = await score(service, *small)
    assert [result.score.reward for result in results] == [10.0] * 10
    assert service.pool.waiting >= 400  # the flood was not served first
    flood.cancel()
    await until(lambda: service.pool.waiting == service.pool.busy == 0)


async def test_a_message_of_several_items_is_answered_as_they_complete():
    quick = [item(tagged("8"), item_id=f"quick-{i}") for i in range(300)]
    bad = item("8", verifier="boxd", item_id="bad")
    slow = item(tagged(ENDLESS), item_id="slow")
    several = reward_pb2.ScoreStreamRequest(items=[slow, *quick, bad, hard(item_id="hard")])
    sent = (several, *requests(item(tagged("9"), item_id="alone")))
    async with serving("reward.deadline_seconds=3") as service:
        messages = [message async for message in service.stub.ScoreStream(iter(sent), timeout=TIMEOUT)]
    batched = [result for message in messages for result in message.results]
    assert {result.item_id for result in batched} == {"slow", "bad", "hard", *(one.item_id for one in quick)}
    assert len(batched) == 303 and len(messages) <= 6  # the quick ones came together
    assert batched[-1].item_id == "hard" and batched[-2].item_id == "slow"  # one worker, first come, first served
    assert batched[-2].score.outcome == reward_pb2.OUTCOME_TIMED_OUT
    kinds = {result.item_id: result.WhichOneof("result") for result in batched}
    assert kinds.pop("bad") == "failure" and set(kinds.values()) == {"score"}
    assert [message.result.item_id for message in messages if message.HasField("result")] == ["alone"]
