"""RewardService over a real socket: who is answered when, and what becomes of work that is given up.

What is refused is in tests/contract/suite, and by field in test_verifiers.py.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import reward_pb2
from reward_samples import ENDLESS, Running, hard, item, serving, spec, tagged, until

from quartet_common.errors import ContractError, retry_delay
from quartet_reward.begun import admitted
from quartet_reward.scoring import Scoring
from quartet_reward.servicer import RewardServicer, ScoreStream
from quartet_server.fair_queue import Admission

TIMEOUT = 60.0
NEW = itertools.count()  # numbers of questions that the service of this file has not been asked yet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


async def score(service, *items):
    response = await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=TIMEOUT)
    return list(response.results)


def request(one: reward_pb2.ScoreItem) -> reward_pb2.ScoreStreamRequest:
    return reward_pb2.ScoreStreamRequest(item=one)


async def test_a_bad_reference_is_the_failure_of_its_item_alone(service):
    right, bad, other = await score(
        service,
        item(tagged(r"\sqrt{63}"), answer=r"3\sqrt{7}", item_id="right by algebra"),
        item(tagged("8"), answer=r"\frac{1}{", item_id="bad"),
        item(r"\boxed{8}", verifiers=[spec("boxed", correct_reward=1.0)], item_id="other"),
    )
    assert [each.item_id for each in (right, bad, other)] == ["right by algebra", "bad", "other"]
    assert (right.score.reward, other.score.reward) == (10.0, 1.0)
    assert right.score.outcome == reward_pb2.OUTCOME_CORRECT and right.score.format_acc == right.score.ans_acc == 1.0
    assert right.score.parsed_answer == r"\sqrt{63}" and right.score.reason and right.score.elapsed.ToNanoseconds() > 0
    assert bad.failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and not bad.failure.retryable
    assert "reference" in bad.failure.message


async def test_a_stream_answers_each_item_as_it_completes(service):
    call = service.stub.ScoreStream(timeout=TIMEOUT)
    await call.write(request(item(tagged(ENDLESS), item_id="slow")))
    for i in range(100):  # they do not queue behind the slow one
        await call.write(request(item(tagged("8"), item_id=f"quick-{i}")))
        assert (await call.read()).result.item_id == f"quick-{i}"
    await call.done_writing()
    for _ in range(2):  # it is tried again where its worker dies
        await until(lambda: service.pool.busy == 1)
        (worker,) = service.pool.pids
        os.kill(worker, signal.SIGKILL)
        await until(lambda worker=worker: worker not in service.pool.pids)
    slow = (await call.read()).result
    assert slow.item_id == "slow" and slow.failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("ends", ["cancelled", "cancelled stream", "deadline"])
async def test_a_call_that_ends_early_kills_its_work(service, ends):
    await score(service, hard(next(NEW)))  # a worker is there
    (victim,) = service.pool.pids
    endless = item(tagged(ENDLESS))
    if ends == "cancelled stream":
        call = service.stub.ScoreStream(timeout=TIMEOUT)
        await call.write(request(endless))
    else:
        timeout = TIMEOUT if ends == "cancelled" else 2.0
        call = service.stub.Score(reward_pb2.ScoreRequest(items=[endless]), timeout=timeout)
    await until(lambda: service.pool.busy == 1)
    if ends == "deadline":
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    else:
        call.cancel()
    await until(lambda: not os.path.exists(f"/proc/{victim}"))
    assert service.pool.waiting == service.pool.busy == 0
    (result,) = await score(service, hard(next(NEW)))
    assert result.score.reward == 10.0


async def test_a_full_queue_says_when_to_come_back_and_plain_numbers_pass(service):
    slow = [hard(next(NEW), item_id=str(i)) for i in range(1023)]
    first = asyncio.create_task(score(service, item(tagged(ENDLESS)), *slow))
    await until(lambda: service.pool.waiting == 1023)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await score(service, hard(next(NEW)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_delay(caught.value) > 0
    (quick,) = await score(service, item(tagged("8")))
    assert quick.score.reward == 10.0
    first.cancel()
    await until(lambda: service.pool.waiting == service.pool.busy == 0)
    (result,) = await score(service, hard(next(NEW)))
    assert result.score.reward == 10.0


async def test_what_is_not_done_at_the_end_is_told():
    async with serving() as service:
        call = service.stub.ScoreStream(timeout=TIMEOUT)
        await call.write(request(item(tagged(ENDLESS), item_id="long")))
        await until(lambda: service.pool.busy == 1)
        draining = asyncio.create_task(service.host.drain())
        result = (await call.read()).result
        assert result.item_id == "long" and result.failure.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN
        assert result.failure.retryable
        await draining


async def test_a_flood_of_one_run_does_not_keep_another_waiting(service):
    await score(service, hard(next(NEW)))
    (worker,) = service.pool.pids
    os.kill(worker, signal.SIGSTOP)
    # More than the room's half, which is what one run may have: the stream is not read to its end.
    numbers = list(itertools.islice(NEW, 605))
    many = [request(hard(i, item_id=str(i), run_id="flood")) for i in numbers[:600]]
    flood = service.stub.ScoreStream(iter(many), timeout=TIMEOUT)
    await until(lambda: service.pool.waiting == 511)
    os.kill(worker, signal.SIGCONT)
    # Half of its questions are among the flood's: those do not have to wait for the flood's turn either.
    small = [hard(i, item_id=str(i), run_id="small") for i in (*numbers[400:405], *numbers[600:])]
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
    sent = (several, request(item(tagged("9"), item_id="alone")))
    async with serving("reward.deadline_seconds=2") as service:
        messages = [message async for message in service.stub.ScoreStream(iter(sent), timeout=TIMEOUT)]
    batched = [result for message in messages for result in message.results]
    assert {result.item_id for result in batched} == {"slow", "bad", "hard", *(one.item_id for one in quick)}
    assert len(batched) == 303 and len(messages) <= 6  # the quick ones came together
    assert batched[-1].item_id == "hard" and batched[-2].item_id == "slow"  # one worker, first come, first served
    assert batched[-2].score.outcome == reward_pb2.OUTCOME_TIMED_OUT
    kinds = {result.item_id: result.WhichOneof("result") for result in batched}
    assert kinds.pop("bad") == "failure" and set(kinds.values()) == {"score"}
    assert [message.result.item_id for message in messages if message.HasField("result")] == ["alone"]


async def test_what_goes_wrong_in_a_program_is_an_outcome(service):
    async def execute(source: str, **limits) -> reward_pb2.ExecuteResponse:
        return await service.stub.Execute(reward_pb2.ExecuteRequest(source=source, limits=limits), timeout=TIMEOUT)

    raised, endless, chatty, killed, odd = await asyncio.gather(
        execute("print('so far')\n1 / 0"),
        execute("while True: pass", wall_time=Duration(seconds=1)),
        execute("while True: print('x')", output_bytes=1000),
        execute("import os; os.kill(os.getpid(), 11)"),
        execute(r"import sys; sys.stdout.buffer.write(b'a\xffb')"),
    )
    assert (raised.outcome, raised.exit_code) == (reward_pb2.EXECUTION_OUTCOME_EXITED, 1)
    assert raised.stdout == "so far\n" and "ZeroDivisionError" in raised.stderr
    assert endless.outcome == reward_pb2.EXECUTION_OUTCOME_TIMED_OUT
    assert chatty.outcome == reward_pb2.EXECUTION_OUTCOME_OUTPUT_EXCEEDED and 0 < len(chatty.stdout) <= 1000
    assert (killed.outcome, killed.signal) == (reward_pb2.EXECUTION_OUTCOME_SIGNALLED, 11)
    assert odd.stdout == "a\N{REPLACEMENT CHARACTER}b"


class Held:
    """A sandbox in which every program runs until it is cancelled."""

    def __init__(self) -> None:
        self.started, self.killed = asyncio.Event(), asyncio.Event()

    async def run(self, job):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.killed.set()


async def test_a_full_queue_refuses_a_program_and_a_cancelled_call_kills_its_own_and_frees_its_place():
    admission, sandbox = Admission(2), Held()  # of two places a run alone may hold one
    servicer = RewardServicer(None, {}, admission, sandbox)
    program = reward_pb2.ExecuteRequest(source="1", run_id="demo")
    first = asyncio.create_task(servicer.Execute(program, None))
    await asyncio.wait_for(sandbox.started.wait(), TIMEOUT)
    with pytest.raises(ContractError) as caught:
        await servicer.Execute(program, None)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(caught.value.details) == 2
    first.cancel()
    await asyncio.wait({first})
    assert sandbox.killed.is_set() and admission.free == 2


async def test_an_item_that_is_cancelled_before_it_begins_frees_its_place():
    async def requests():
        yield reward_pb2.ScoreStreamRequest(item=reward_pb2.ScoreItem(item_id="1"))
        raise ConnectionError("the caller is gone")

    admission, scorer = Admission(2), SimpleNamespace(begin=lambda *_: Scoring("", 0, [0.0], admitted()))
    with pytest.raises(ExceptionGroup):
        await ScoreStream(scorer, admission, None, lambda: False).run(requests())
    assert admission.free == 2
