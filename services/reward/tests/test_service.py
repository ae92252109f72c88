"""RewardService over a real socket, good and bad input."""

import asyncio
import json
import os
import signal
import time

import grpc
import pytest
from quartet.v1 import common_pb2, reward_pb2
from reward_samples import DEADLINE_SECONDS, ENDLESS, hard, item, spec, tagged

from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.errors import describe, retry_delay
from quartet_common.handshake import handshake

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


async def until(condition, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_the_handshake_says_how_idle_it_is(service):
    async with connect(service.host.address, SecuritySection()) as channel, asyncio.timeout(30):
        while not (answer := await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)).HasField("idle_fraction"):
            await asyncio.sleep(0.05)
    assert 0 <= answer.idle_fraction <= 1


async def test_a_batch_is_answered_in_order(service):
    results = await score(
        service,
        item(tagged("8"), item_id="right"),
        item(tagged(r"\sqrt{64}"), item_id="right by algebra"),
        item(tagged("9"), item_id="wrong"),
        item("8", item_id="malformed"),
        item(tagged("8"), answer="", item_id="no reference"),
        item(tagged("8"), answer=r"\frac{1}{", item_id="bad reference"),
        item(r"\boxed{8}", item_id="other", verifiers=[spec("boxed", correct_reward=1.0)]),
    )
    assert [result.item_id for result in results] == [
        *("right", "right by algebra", "wrong", "malformed", "no reference", "bad reference", "other")
    ]
    assert [result.score.reward for result in results] == [10, 10, 0, 0, 0, 0, 1]
    assert [result.WhichOneof("result") for result in results] == ["score"] * 4 + ["failure"] * 2 + ["score"]
    for bad in results[4:6]:
        assert bad.failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and not bad.failure.retryable
        assert "reference" in bad.failure.message
    right = results[1].score
    assert right.outcome == reward_pb2.OUTCOME_CORRECT and right.format_acc == right.ans_acc == 1.0
    assert right.parsed_answer == r"\sqrt{64}" and right.reason and right.elapsed.ToNanoseconds() > 0


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


@pytest.mark.parametrize(
    ("one", "field", "allowed"),
    [
        (item("8", verifier="boxd"), "items[0].verifiers[0].name", "did you mean 'boxed'"),
        (item("8", verifier="none"), "items[0].verifiers[0].name", "boxed, "),
        (item("8", verifiers=[]), "items[0].verifiers", "at least one"),
        (item("8", item_id=""), "items[0].item_id", "1 to 256"),
        (item("8", item_id="a" * 257), "items[0].item_id", "1 to 256"),
        (
            item("8", verifiers=[spec("boxed", reward=1)]),
            "items[0].verifiers[0].parameters.reward",
            "correct_reward, string_match_reward",
        ),
        (
            item("8", verifiers=[spec("boxed", correct_reward="much")]),
            "items[0].verifiers[0].parameters.correct_reward",
            "valid number",
        ),
        (item("8", verifiers=[spec("boxed", weight=float("nan"))]), "items[0].verifiers[0].weight", "finite"),
        (item("8", verifiers=[spec("boxed", weight=-1e19)]), "items[0].verifiers[0].weight", "at most 1e+18 in size"),
        (
            item("8", verifiers=[spec("boxed", correct_reward=float("nan"))]),
            "items[0].verifiers[0].parameters.correct_reward",
            "got nan; allowed: a finite number",
        ),
        (
            item("8", verifiers=[spec("math", choices=["A", {"b": [float("-inf")]}])]),
            "items[0].verifiers[0].parameters.choices[1].b[0]",
            "got -inf; allowed: a finite number",
        ),
        (
            item("8", verifiers=[spec("boxed", weight=1e10, correct_reward=1e308)]),
            "items[0].verifiers[0].parameters.correct_reward",
            "at most 1e+18 in size",
        ),
    ],
)
async def test_bad_items_are_refused_by_field(service, one, field, allowed):
    code, sentence = await refused(service, one)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith(field + ":") and allowed in sentence


async def test_a_refusal_shows_the_beginning_of_what_is_too_long_for_a_status(service):
    many = "\U0001f600" * 100_000
    for one in (item("8", verifier=many), item("8", verifiers=[spec("boxed", **{many: many})])):
        code, sentence = await refused(service, one)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and many[:80] in sentence and len(sentence) < 1000


async def test_bad_batches_are_refused(service):
    assert await refused(service) == (grpc.StatusCode.INVALID_ARGUMENT, "items: got 0 items; allowed: 1 to 1024")
    many = [item("8", item_id=str(i)) for i in range(1025)]
    assert "got 1025 items; allowed: 1 to 1024" in (await refused(service, *many))[1]
    code, sentence = await refused(service, item("8"), item("9", item_id="b"), item("7"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence.startswith("items[2].item_id: got 'a', which items[0] has")
    assert len(await score(service, *many[:1024])) == 1024


async def test_an_endless_answer_times_out_and_is_an_outcome(service):
    (result,) = await score(service, item(tagged(ENDLESS)))
    assert result.score.outcome == reward_pb2.OUTCOME_TIMED_OUT
    assert result.score.reward == 0.0 and result.score.ans_acc == 0.0
    (result,) = await score(service, hard(100))
    assert result.score.outcome == reward_pb2.OUTCOME_CORRECT


async def test_a_worker_that_keeps_dying_is_a_failure_and_never_a_number(service):
    task = asyncio.create_task(score(service, item(tagged(ENDLESS))))
    for _ in range(2):
        await until(lambda: service.pool.busy == 1)
        (pid,) = service.pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: pid not in service.pool.pids)
    (result,) = await task
    assert result.WhichOneof("result") == "failure"
    assert result.failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED and result.failure.retryable


async def test_a_stream_answers_each_item_as_it_completes(service):
    await score(service, hard(101))  # a worker is there
    call = service.stub.ScoreStream(timeout=TIMEOUT)
    await call.write(requests(item(tagged(ENDLESS), item_id="slow"))[0])
    began = time.perf_counter()
    for i in range(100):
        await call.write(requests(item(tagged("8"), item_id=f"quick-{i}"))[0])
        assert (await call.read()).result.item_id == f"quick-{i}"
    assert time.perf_counter() - began < DEADLINE_SECONDS  # they did not queue behind the slow one
    await call.done_writing()
    slow = (await call.read()).result
    assert slow.item_id == "slow" and slow.score.outcome == reward_pb2.OUTCOME_TIMED_OUT
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_an_invalid_item_does_not_end_the_stream(service):
    items = [
        item("8", verifier="boxd", item_id="unknown"),
        item("8", verifiers=[spec("boxed", correct_reward=float("nan"))], item_id="nan"),
        item(tagged("8"), item_id="good"),
        item(tagged("8"), item_id="good"),
        item("8", verifiers=[], item_id="none"),
        item("x", verifier="length", item_id="no tokens"),
    ]
    results = [response.result async for response in service.stub.ScoreStream(iter(requests(*items)), timeout=TIMEOUT)]
    assert [result.item_id for result in results] == ["unknown", "nan", "good", "good", "none", "no tokens"]
    assert results[2].score.reward == 10.0
    for bad in (*results[:2], *results[3:]):
        assert bad.failure.kind == reward_pb2.FAILURE_KIND_INVALID_ITEM and not bad.failure.retryable
    assert "boxed" in results[0].failure.message and "unique" in results[3].failure.message
    assert "parameters.correct_reward: got nan" in results[1].failure.message


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cancelled_call_kills_its_work(service, streamed):
    await score(service, hard(102))
    (victim,) = service.pool.pids
    if streamed:
        call = service.stub.ScoreStream(timeout=TIMEOUT)
        await call.write(requests(item(tagged(ENDLESS)))[0])
    else:
        call = service.stub.Score(reward_pb2.ScoreRequest(items=[item(tagged(ENDLESS))]), timeout=TIMEOUT)
        task = asyncio.ensure_future(call)
    await until(lambda: service.pool.busy == 1)
    call.cancel()
    if not streamed:
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: not os.path.exists(f"/proc/{victim}"), seconds=DEADLINE_SECONDS * 0.75)
    assert service.pool.waiting == service.pool.busy == 0
    (result,) = await score(service, hard(77))
    assert result.score.reward == 10.0


async def test_a_full_queue_says_when_to_come_back_and_plain_numbers_pass(service):
    slow = [hard(i, item_id=str(i)) for i in range(1023)]
    first = asyncio.create_task(score(service, item(tagged(ENDLESS)), *slow))
    await until(lambda: service.pool.waiting >= 1000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, hard(103))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(caught.value) > 0
    (quick,) = await score(service, item(tagged("8")), timeout=DEADLINE_SECONDS)
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


async def test_the_verifiers_are_listed_with_their_parameters(service):
    listed = (await service.stub.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=TIMEOUT)).verifiers
    names = [one.name for one in listed]
    assert names == sorted(names) and {"boxed", "exact", "format", "length", "think_answer_tags"} <= set(names)
    for one in listed:
        assert one.description
        assert json.loads(one.parameters_schema)["additionalProperties"] is False
    assert (
        json.loads(listed[names.index("think_answer_tags")].parameters_schema)["properties"]["correct_reward"][
            "default"
        ]
        == 10.0
    )


async def test_strange_texts_are_survived(service):
    strange = ["\x00", "\ud7ff\U0001f600", "{" * 3000, "\\frac" * 300, "$" * 1999, "(" * 1500, "9" * 1999, "^" * 100]
    items = [item(tagged(text), item_id=str(i)) for i, text in enumerate(strange)]
    for result in await score(service, *items):
        assert result.score.reward == 0.0, result
        assert result.score.outcome in (reward_pb2.OUTCOME_INCORRECT, reward_pb2.OUTCOME_TIMED_OUT)


async def test_a_flood_of_one_run_does_not_keep_another_waiting(service):
    await score(service, hard(106))
    flood = service.stub.ScoreStream(timeout=TIMEOUT)
    for i in range(1500):  # more than the room's half: the stream is not read to its end
        one = hard(i, item_id=str(i), run_id="flood")
        writing = asyncio.ensure_future(flood.write(requests(one)[0]))
        await asyncio.wait((writing,), timeout=0.05)
        if not writing.done():
            break
    await until(lambda: service.pool.waiting >= 100)
    before = service.pool.waiting
    # Half of its questions are among the flood's: those do not have to wait for the flood's turn either.
    small = [hard(i, item_id=str(i), run_id="small") for i in (*range(400, 405), *range(5000, 5005))]
    results = await score(service, *small)
    assert [result.score.reward for result in results] == [10.0] * 10
    assert service.pool.waiting >= before - 100  # the flood was not served first
    flood.cancel()
    await until(lambda: service.pool.waiting == service.pool.busy == 0)


async def test_the_deadline_of_a_call_ends_its_work(service):
    await score(service, hard(107))
    (victim,) = service.pool.pids
    began = time.perf_counter()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, item(tagged(ENDLESS)), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not os.path.exists(f"/proc/{victim}"), seconds=DEADLINE_SECONDS * 0.75)
    assert time.perf_counter() - began < DEADLINE_SECONDS
    assert service.pool.waiting == service.pool.busy == 0


async def test_work_of_a_cancelled_call_is_gone_within_a_fifth_of_a_second(service):
    needed = []
    for _ in range(3):
        await score(service, hard(len(needed)))  # the fresh worker serves
        (victim,) = service.pool.pids
        call = service.stub.ScoreStream(timeout=TIMEOUT)
        await call.write(requests(item(tagged(ENDLESS)))[0])
        await until(lambda: service.pool.busy == 1)
        began = time.perf_counter()
        call.cancel()
        while os.path.exists(f"/proc/{victim}"):
            await asyncio.sleep(0.002)
            assert time.perf_counter() - began < DEADLINE_SECONDS / 2
        needed.append(time.perf_counter() - began)
    assert min(needed) < 0.2, needed  # the shortest: other processes of the machine may delay one or the other


async def test_a_message_of_several_items_is_answered_as_they_complete(service):
    await score(service, hard(108))
    call = service.stub.ScoreStream(timeout=TIMEOUT)
    quick = [item(tagged("8"), item_id=f"quick-{i}") for i in range(300)]
    bad = item("8", verifier="boxd", item_id="bad")
    slow = item(tagged(ENDLESS), item_id="slow")
    await call.write(reward_pb2.ScoreStreamRequest(items=[slow, *quick, bad, hard(item_id="hard")]))
    await call.write(requests(item(tagged("9"), item_id="alone"))[0])
    await call.done_writing()
    messages = [message async for message in call]
    batched = [result for message in messages for result in message.results]
    assert {result.item_id for result in batched} == {"slow", "bad", "hard", *(one.item_id for one in quick)}
    assert len(batched) == 303 and len(messages) <= 6  # the quick ones came together
    assert batched[-1].item_id == "hard" and batched[-2].item_id == "slow"  # one worker, first come, first served
    kinds = {result.item_id: result.WhichOneof("result") for result in batched}
    assert kinds.pop("bad") == "failure" and set(kinds.values()) == {"score"}
    assert [message.result.item_id for message in messages if message.HasField("result")] == ["alone"]


async def test_a_stream_refuses_what_is_no_request(service):
    one = item("8")
    for request, field in (
        (reward_pb2.ScoreStreamRequest(item=one, items=[one]), "item:"),
        (reward_pb2.ScoreStreamRequest(items=[one] * 1025), "items:"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in service.stub.ScoreStream(iter([request]), timeout=TIMEOUT):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert describe(caught.value).startswith(field)
