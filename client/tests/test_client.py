"""The client, asyncio and blocking, on the real broker and small services."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import trainer_pb2
from real_broker import Life, door

from quartet_client import AsyncClient, Client, InputError, QuartetError
from quartet_common.config import SecuritySection

PROMPTS = [{"prompt": "2+3=5", "gt_answer": "5"}, {"prompt": "1+1=3", "gt_answer": "2"}, "no reference"]


async def test_prompts_go_in_and_scored_groups_come_back(address):
    life = Life(address, "demo")
    async with AsyncClient(address) as client:
        handles = await client.submit("demo", PROMPTS)
        await asyncio.to_thread(life.answer)
        groups = {group.instance_id: group async for group in client.results(handles)}
    right, wrong, _ = (groups[handle.instance_id].completions[0] for handle in handles)
    assert (right.text, right.reward, right.reason) == ("2+3=5", 1.0, "the answer is in the text")
    assert wrong.reward == 0.0 and wrong.score.outcome == "incorrect" and wrong.finish_reason == "stop"
    assert right.policy_version == 3 and [span.policy_version for span in right.version_spans] == [3, 4]
    assert groups[handles[0].instance_id].purpose == "serve" and groups[handles[0].instance_id].answer == "5"


def test_threads_share_a_blocking_client_and_an_interrupt_ends_an_iteration_at_once(address):
    life = Life(address, "demo")
    with Client(address) as client:
        seen = []

        def work() -> None:
            groups = list(client.results(client.submit("demo", PROMPTS)))
            assert sorted(group.completions[0].reward for group in groups) == [0.0, 0.0, 1.0]
            seen.extend(group.instance_id for group in groups)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            life.answer()
        assert len(set(seen)) == 12 and [run.run_id for run in client.list_runs()] == ["demo"]

        unanswered = client.submit("demo", "?")
        threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            list(client.results(unanswered))
        for _ in client.watch("demo"):
            break  # and leaving one early
        assert client.get_run("demo").active


def test_closing_a_blocking_client_ends_the_calls_of_other_threads(address):
    Life(address, "demo")
    client = Client(address)
    groups = client.results(client.submit("demo", "?"))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, groups)
        time.sleep(0.3)
        client.close()
        with pytest.raises(QuartetError, match="the client is closed"):
            waiting.result(timeout=5)
    client.close()
    with pytest.raises(QuartetError, match="the client is closed"):
        client.list_runs()


async def test_results_survive_a_broken_stream(address, nowhere):
    life = Life(address, "demo")
    async with AsyncClient(nowhere) as client:
        with door(nowhere, address):
            handles = await client.submit("demo", PROMPTS)
            await asyncio.to_thread(life.answer, 1)
            groups = client.results(handles)
            found = [(await anext(groups)).instance_id]
        await asyncio.to_thread(life.answer)
        with door(nowhere, address):
            found += [group.instance_id async for group in groups]
    assert sorted(found) == sorted(handle.instance_id for handle in handles)


async def test_a_caller_may_take_longer_over_a_result_than_it_waits_for_the_next(address):
    life = Life(address, "demo")
    async with AsyncClient(address) as client:
        groups = client.results(await client.submit("demo", PROMPTS), timeout=2.0)
        await asyncio.to_thread(life.answer)
        await anext(groups)
        await asyncio.sleep(2.2)
        assert len([group async for group in groups]) == 2


async def test_missing_results_name_the_rollouts_with_weights(address):
    life = Life(address, "demo")
    trainer = pb.Member(instance_id="t1", kind="SERVICE_KIND_TRAINER", address="127.0.0.1:1", policy_version=0)
    life.call("RegisterMember", pb.RegisterMemberRequest(run_id="demo", member=trainer))
    async with AsyncClient(address) as client:
        with pytest.raises(QuartetError, match=r"have no result after 0 s .*; 1 rollout with weights at work"):
            await anext(client.results(await client.submit("demo", "?"), timeout=0))


async def test_a_full_queue_is_waited_for_but_not_for_ever(address):
    life = Life(address, "demo", max_queued_prompts=1)
    async with AsyncClient(address) as client:
        await client.submit("demo", "a", purpose="train")
        with pytest.raises(QuartetError, match="1 prompts wait and at most 1 may"):
            await client.submit("demo", "b", purpose="train", timeout=0.01)
        waiting = asyncio.create_task(client.submit("demo", "b", purpose="train", timeout=30))
        await asyncio.to_thread(life.answer)
        assert len(await waiting) == 1


async def test_generate_and_score_go_straight_to_their_services(reward_and_rollout):
    async with AsyncClient(**reward_and_rollout) as client:
        completions = await client.generate({"prompt": "hi", "sampling": {"n": 2}})
        assert len(completions) == 2 and completions[0].token_ids == (7, 8)
        assert completions[0].log_probs == (-1.0, 0.0) and completions[0].score is None
        assert (completions[0].turns, completions[0].inserted_tokens, completions[0].sampling_mask) == (1, 0, ())
        (masked,) = await client.generate("hi", run_id="demo", sampling_masks=True)
        assert masked.sampling_mask == ((), (6, 8))
        with pytest.raises(QuartetError, match="works for run 'demo', not for 'other'"):
            await client.generate("hi", run_id="other")
        right, wrong = await client.score(["it is 5", "it is \ud800"], {"prompt": "?", "gt_answer": "5"}, ["exact"])
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        (own,) = await client.score(prompt={"prompt": "?", "gt_answer": "5"}, verifiers=["reward.py:close"])
        assert own.reward == 1.0
        with pytest.raises(InputError, match="prompt '' has no gt_answer to score as its completion"):
            await client.score(prompt="?", verifiers=["exact"])
        with pytest.raises(InputError, match=r"prompt: got None; allowed: an object with a prompt's fields, or its te"):
            await client.score(["5"], verifiers=["exact"])
        with pytest.raises(InputError, match=r"completions\[1\]: got {'text': '5'}; allowed: a text"):
            await client.score(["5", {"text": "5"}], "?", ["exact"])
        with pytest.raises(InputError, match="handles: got 'demo'; allowed: what submit returned"):
            await anext(client.results(["demo"]))
        (failed,) = await client.score("a text alone", "no answer", ["exact"])
        assert failed.reward is None and failed.failure == "the reference answer is empty"
        assert await client.list_verifiers() == {"exact": "The answer, character by character."}


async def test_an_evaluation_that_is_cancelled_while_it_pauses_the_trainer_resumes_it(monkeypatch):
    calls, pausing = [], asyncio.Event()

    async def call(rpc, request):
        calls.append(type(request))
        if isinstance(request, trainer_pb2.PauseRequest):
            pausing.set()
            await asyncio.Event().wait()
        return trainer_pb2.TrainerServiceGetStatusResponse()

    client = AsyncClient()
    monkeypatch.setattr(client.connections.trainer, "call", call)
    evaluation = asyncio.create_task(client.evaluate("demo", "heldout", hold=True))
    await pausing.wait()
    evaluation.cancel()
    await asyncio.wait({evaluation})
    asked = [trainer_pb2.TrainerServiceGetStatusRequest, trainer_pb2.PauseRequest, trainer_pb2.ResumeRequest]
    assert evaluation.cancelled() and calls == asked


async def test_what_cannot_be_is_one_sentence_each(addresses, nowhere):
    async with AsyncClient(addresses["broker"]) as client, AsyncClient(nowhere) as away:
        mistaken = AsyncClient(addresses["reward"])
        for call, sentence in (
            (client.submit("demo", PROMPTS, purpose="sell"), "purpose: got 'sell'; allowed: serve, train, evaluate"),
            (client.submit("demo", MappingProxyType({"gt_answer": "5"})), "prompts[0]: got none of them;"),
            (client.evaluate("demo", "set", prompts={"gt_answer": "5"}), "prompts[0]: got none of them;"),
            (client.submit("demo", [7]), "prompts[0]: got 7; allowed: an object with a prompt's fields, or its text"),
            (client.submit("gone", ["a"]), "run 'gone' does not exist: make it with CreateRun; there are no runs"),
            (client.score(["x"], "y"), "verifiers: got none"),
            (client.generate("x", address="nowhere"), "an address is host:port"),
            (client.get_service("worker"), "kind: got 'worker'; allowed: broker, reward, rollout, trainer"),
            (away.list_runs(), f"broker at {nowhere}: nothing listens there"),
            (mistaken.list_runs(), f"{addresses['reward']} was taken for the broker, but a reward answers there"),
        ):
            with pytest.raises(QuartetError) as error:
                await call
            assert str(error.value).startswith(sentence) and error.value.exit_code == 2
        await mistaken.close()
    with pytest.raises(InputError, match="an address is host:port"):
        AsyncClient("localhost")
    async with AsyncClient(security=SecuritySection(tls_ca="a", tls_certificate="b", tls_key="c")) as client:
        with pytest.raises(InputError, match="security.tls_ca: cannot read 'a'"):
            await client.list_runs()
