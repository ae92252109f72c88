"""RolloutService over real sockets: bad input of every RPC, and direct generation."""

import asyncio

import grpc
import numpy as np
import pytest
from conftest import begin_request, finish_request, join_request
from google.rpc import error_details_pb2, status_pb2
from quartet.v1 import experience_pb2, rollout_pb2

from quartet_common.errors import describe, retry_delay
from quartet_common.tensors import decode, encode


async def refusal(call, code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() == code, caught.value
    return caught.value


def bad_field(error: grpc.aio.AioRpcError) -> str:
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            bad = error_details_pb2.BadRequest()
            assert status_pb2.Status.FromString(value).details[0].Unpack(bad)
            return bad.field_violations[0].field
    raise AssertionError("the error has no details")


@pytest.fixture
async def up(world):
    await world.start()
    await world.until(lambda: world.service.state.engine is not None and world.service.state.run is not None)
    return world


@pytest.mark.parametrize(
    "field, value",
    [
        ("group_epoch", -1),
        ("store_host", ""),
        ("store_port", 0),
        ("store_port", 70000),
        ("rank", 0),
        ("rank", 2),
        ("world_size", 1),
        ("transport", rollout_pb2.WEIGHT_TRANSPORT_UNSPECIFIED),
    ],
)
async def test_join_refuses_bad_fields(up, field, value):
    request = join_request(**{field: value})
    error = await refusal(up.stub.JoinWeightGroup(request, timeout=5), grpc.StatusCode.INVALID_ARGUMENT)
    assert bad_field(error) == ("rank" if field == "world_size" else field)


@pytest.mark.parametrize("transport", [rollout_pb2.WEIGHT_TRANSPORT_NCCL, rollout_pb2.WEIGHT_TRANSPORT_FILE])
async def test_join_refuses_transports_it_lacks(up, transport):
    request = join_request(transport=transport)
    await refusal(up.stub.JoinWeightGroup(request, timeout=5), grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize("name", ["", "gloo", "in_flight"])
async def test_join_refuses_a_packages_transport_without_a_name_of_its_own(up, name):
    request = join_request(transport=rollout_pb2.WEIGHT_TRANSPORT_CUSTOM, transport_name=name)
    error = await refusal(up.stub.JoinWeightGroup(request, timeout=5), grpc.StatusCode.INVALID_ARGUMENT)
    assert bad_field(error) == "transport_name"


async def test_join_refuses_a_packages_transport_that_is_not_installed_with_the_cure(up):
    request = join_request(transport=rollout_pb2.WEIGHT_TRANSPORT_CUSTOM, transport_name="pigeon", store_port=0)
    error = await refusal(up.stub.JoinWeightGroup(request, timeout=5), grpc.StatusCode.UNIMPLEMENTED)
    assert "install the package with the entry point 'pigeon' of quartet.transports" in describe(error)


async def test_join_refuses_other_libraries_with_the_cure(up):
    up.host.libraries["torch"] = "2.13.0"
    request = join_request()
    request.libraries["torch"] = "2.14.0"
    error = await refusal(up.stub.JoinWeightGroup(request, timeout=5), grpc.StatusCode.FAILED_PRECONDITION)
    assert "install torch 2.14.0" in describe(error)
    request.libraries["torch"] = "2.13.0"
    await up.stub.JoinWeightGroup(request, timeout=5)


async def test_weight_calls_of_another_run_are_refused(up):
    calls = [
        up.stub.JoinWeightGroup(join_request(run_id="other"), timeout=5),
        up.stub.BeginWeightUpdate(rollout_pb2.BeginWeightUpdateRequest(run_id="other"), timeout=5),
        up.stub.FinishWeightUpdate(rollout_pb2.FinishWeightUpdateRequest(run_id="other"), timeout=5),
        up.stub.AbortWeightUpdate(rollout_pb2.AbortWeightUpdateRequest(run_id="other"), timeout=5),
    ]
    for call in calls:
        error = await refusal(call, grpc.StatusCode.FAILED_PRECONDITION)
        assert "'demo'" in describe(error) and "'other'" in describe(error)


async def test_begin_refuses_manifests_that_do_not_fit(up):
    await up.stub.JoinWeightGroup(join_request(), timeout=5)

    async def sentence(request) -> str:
        error = await refusal(up.stub.BeginWeightUpdate(request, timeout=5), grpc.StatusCode.INVALID_ARGUMENT)
        return describe(error)

    request = begin_request(1)
    request.manifest.kind = rollout_pb2.WEIGHT_KIND_UNSPECIFIED
    assert "manifest.kind" in await sentence(request)
    request = begin_request(1)
    request.manifest.checksum_algorithm = "md5"
    assert "checksum_algorithm: got 'md5'" in await sentence(request)
    request = begin_request(1)
    request.manifest.tensors[0].shape[0] = 99
    assert "tensor 'w'" in await sentence(request)
    request = begin_request(1)
    request.manifest.ClearField("tensors")
    assert "manifest.tensors" in await sentence(request)
    up.engine.manifest_error = "tensor 'w' is not in this model"
    assert "tensor 'w' is not in this model" in await sentence(begin_request(1))
    assert "policy_version" in await sentence(begin_request(-1))
    assert up.engine.unpaused.is_set() and not up.service.state.paused


async def test_begin_and_finish_need_what_goes_before(up):
    error = await refusal(up.stub.BeginWeightUpdate(begin_request(1), timeout=5), grpc.StatusCode.FAILED_PRECONDITION)
    assert "join first" in describe(error)
    error = await refusal(up.stub.FinishWeightUpdate(finish_request(1), timeout=5), grpc.StatusCode.FAILED_PRECONDITION)
    assert "no update to version 1 was begun" in describe(error)


async def test_calls_wait_for_the_engine(world):
    loading = asyncio.Event()
    world.engine.start = loading.wait
    await world.start()
    assert "engine loading" in list(world.host.waiting)
    await refusal(world.stub.JoinWeightGroup(join_request(), timeout=20), grpc.StatusCode.UNAVAILABLE)
    generate = rollout_pb2.GenerateRequest(prompt={"text": "x"})
    error = await refusal(world.stub.Generate(generate, timeout=5), grpc.StatusCode.UNAVAILABLE)
    assert "still loading" in describe(error) and retry_delay(error)
    loading.set()
    await world.until(lambda: world.service.state.run is not None)
    await world.stub.Generate(generate, timeout=5)


async def test_generate_answers_in_order_with_tokens_and_versions(up):
    prompt = experience_pb2.Prompt(text="hi", sampling={"n": 3})
    answer = await up.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=5)
    assert [completion.info.index for completion in answer.completions] == [0, 1, 2]
    last = answer.completions[2]
    assert last.info.text == "ccccc" and last.info.tokens == 5 and not last.info.HasField("score")
    assert decode(last.token_ids).tolist() == [99] * 5 and decode(last.log_probs).dtype == np.float32
    assert (last.info.version_spans[0].policy_version, last.info.version_spans[0].end) == (0, 5)
    assert not up.broker.puts and not up.reward.items


async def test_generate_returns_sampling_masks_when_asked(up):
    up.engine.gives_masks = True
    prompt = experience_pb2.Prompt(text="hi", sampling={"n": 2})
    asked = rollout_pb2.GenerateRequest(prompt=prompt, sampling_masks=True)
    answer = await up.stub.Generate(asked, timeout=5)
    masks = [(one.sampling_mask_counts, one.sampling_mask_token_ids) for one in answer.completions]
    assert [decode(counts).tolist() for counts, _ in masks] == [[0, 2, 2], [0, 2, 2, 2]]
    assert [decode(ids).tolist() for _, ids in masks] == [[97, 98] * 2, [98, 99] * 3]
    answer = await up.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=5)
    assert not any(one.HasField("sampling_mask_counts") for one in answer.completions)


async def test_generate_refuses_masks_that_the_engine_cannot_tell(up):
    asked = rollout_pb2.GenerateStreamRequest(prompt={"text": "hi"}, sampling_masks=True)
    error = await refusal(up.stub.GenerateStream(asked, timeout=5).read(), grpc.StatusCode.FAILED_PRECONDITION)
    assert describe(error).startswith("sampling_masks: this engine cannot tell the candidates of its tokens; allowed:")


async def test_generate_stream_sends_each_as_it_finishes(up):
    prompt = experience_pb2.Prompt(token_ids=encode(np.asarray([1, 2], np.int32)), sampling={"n": 2})
    stream = up.stub.GenerateStream(rollout_pb2.GenerateStreamRequest(prompt=prompt), timeout=5)
    assert [response.completion.info.text async for response in stream] == ["aaa", "bbbb"]
    assert up.engine.requests[0][1] == [1, 2]


async def test_cancelling_a_stream_aborts_the_generation(up):
    up.engine.hold(1)
    prompt = experience_pb2.Prompt(text="hi", sampling={"n": 2, "max_new_tokens": 60})
    stream = up.stub.GenerateStream(rollout_pb2.GenerateStreamRequest(prompt=prompt), timeout=30)
    read = asyncio.ensure_future(stream.read())
    await up.until(lambda: up.engine.running == 2)
    stream.cancel()
    await asyncio.gather(read, return_exceptions=True)
    await up.until(lambda: up.engine.running == 0)


@pytest.mark.parametrize(
    "prompt, field",
    [
        (experience_pb2.Prompt(), "prompt.input"),
        (experience_pb2.Prompt(text=""), "prompt.text"),
        (experience_pb2.Prompt(chat={}), "prompt.chat.messages"),
        (experience_pb2.Prompt(chat={"messages": [{"role": "assistant", "content": "x"}]}), "prompt.chat"),
        (experience_pb2.Prompt(token_ids=encode(np.asarray([1.0], np.float32))), "prompt.token_ids"),
        (experience_pb2.Prompt(token_ids={"dtype": 2, "shape": [4], "data": b"x"}), "prompt.token_ids"),
        (experience_pb2.Prompt(text="x" * 64), "prompt.input"),
        (experience_pb2.Prompt(text="x", sampling={"n": 2000}), "prompt.sampling.n"),
        (experience_pb2.Prompt(text="x", sampling={"max_new_tokens": -1}), "prompt.sampling.max_new_tokens"),
        (experience_pb2.Prompt(text="x", sampling={"temperature": -1.0}), "prompt"),
        (experience_pb2.Prompt(text="x", sampling={"top_p": 0.0}), "prompt"),
    ],
)
async def test_generate_refuses_bad_prompts(up, prompt, field):
    error = await refusal(
        up.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=5), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert bad_field(error) == field
    stream = up.stub.GenerateStream(rollout_pb2.GenerateStreamRequest(prompt=prompt), timeout=5)
    error = await refusal(stream.read(), grpc.StatusCode.INVALID_ARGUMENT)
    assert bad_field(error) == field


async def test_a_chat_needs_a_chat_template(up):
    up.service.state.reader._tokenizer.chat_template = None
    prompt = experience_pb2.Prompt(chat={"messages": [{"role": "user", "content": "x"}]})
    error = await refusal(
        up.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=5), grpc.StatusCode.INVALID_ARGUMENT
    )
    assert "the model has no chat template" in describe(error)


async def test_direct_generation_is_bounded(world):
    world.engine.unpaused.clear()
    await world.start(max_direct_completions=3, max_direct_queued=0)
    await world.until(lambda: world.service.state.run is not None)
    request = rollout_pb2.GenerateRequest(prompt={"text": "x"})
    first = asyncio.ensure_future(world.stub.Generate(request, timeout=20))
    await world.until(lambda: world.engine.running == 2)
    error = await refusal(world.stub.Generate(request, timeout=5), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert "2 completions are under way" in describe(error) and retry_delay(error)
    world.engine.unpaused.set()
    await first
    await world.stub.Generate(request, timeout=5)
