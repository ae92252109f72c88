"""RolloutService over real sockets: bad input of every RPC, and direct generation. One rollout answers all of it."""

import grpc
import pytest
import pytest_asyncio
from doubles import InTestBroker
from google.rpc import error_details_pb2, status_pb2
from quartet.v1 import experience_pb2, rollout_pb2
from world import begin_request, neighbours, refusal, refused

from quartet_common.durations import to_duration
from quartet_common.tensors import decode
from quartet_rollout.engines import ManifestError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory):
    broker = InTestBroker()
    broker.create_run()
    async with neighbours(tmp_path_factory.mktemp("model"), broker) as make:
        world = make()
        world.engine.policy_version = 0
        await world.ready()
        yield world


def bad_field(error: grpc.aio.AioRpcError) -> str:
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            bad = error_details_pb2.BadRequest()
            assert status_pb2.Status.FromString(value).details[0].Unpack(bad)
            return bad.field_violations[0].field
    raise AssertionError("the error has no details")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": -1}, "group_epoch"),
        ({"store_host": ""}, "store_host"),
        ({"store_port": 70000}, "store_port"),
        ({"rank": 2}, "rank"),
        ({"world_size": 1}, "rank"),
        ({"timeout": to_duration(1e9)}, "timeout"),
        ({"transport": rollout_pb2.WEIGHT_TRANSPORT_CUSTOM}, "transport_name"),
        ({"transport": rollout_pb2.WEIGHT_TRANSPORT_CUSTOM, "transport_name": "gloo"}, "transport_name"),
        ({"transport": rollout_pb2.WEIGHT_TRANSPORT_CUSTOM, "transport_name": "in_flight"}, "transport_name"),
    ],
)
async def test_join_refuses_bad_fields(up, fields, field):
    error = await refusal(up.join(**{"epoch": 1, **fields}), grpc.StatusCode.INVALID_ARGUMENT)
    assert bad_field(error) == field


@pytest.mark.parametrize(
    ("transport", "name", "words"),
    [
        (rollout_pb2.WEIGHT_TRANSPORT_FILE, "", "cannot receive by file"),
        (rollout_pb2.WEIGHT_TRANSPORT_CUSTOM, "pigeon", "install the package with the entry point 'pigeon' of"),
    ],
)
async def test_join_refuses_transports_it_lacks(up, transport, name, words):
    call = up.join(transport=transport, transport_name=name)
    assert words in await refused(call, grpc.StatusCode.UNIMPLEMENTED)


async def test_begin_refuses_what_does_not_fit(up, monkeypatch):
    await up.join()

    async def sentence(request) -> str:
        return await refused(up.stub.BeginWeightUpdate(request, timeout=5), grpc.StatusCode.INVALID_ARGUMENT)

    for spoil, words in (
        (lambda manifest: manifest.ClearField("kind"), "manifest.kind"),
        (lambda manifest: setattr(manifest, "checksum_algorithm", "md5"), "checksum_algorithm: got 'md5'"),
        (lambda manifest: manifest.tensors[0].shape.append(99), "tensor 'w'"),
        (lambda manifest: manifest.ClearField("tensors"), "manifest.tensors"),
    ):
        request = begin_request(1)
        spoil(request.manifest)
        assert words in await sentence(request)
    for version in (-1, 2**53):
        assert "policy_version" in await sentence(begin_request(version))
    assert "timeout" in await sentence(begin_request(1, seconds=1e9))
    monkeypatch.setitem(up.engine.errors, "check_manifest", ManifestError("tensor 'w' is not in this model"))
    assert "tensor 'w' is not in this model" in await sentence(begin_request(1))
    assert up.engine.unpaused.is_set() and not up.service.state.paused


def generate(up, masks: bool = False, **prompt):
    request = rollout_pb2.GenerateRequest(prompt=experience_pb2.Prompt(**prompt), sampling_masks=masks)
    return up.stub.Generate(request, timeout=5)


async def test_generate_returns_sampling_masks_when_asked(up, monkeypatch):
    monkeypatch.setattr(up.engine, "gives_masks", True)
    answer = await generate(up, True, text="hi", sampling={"n": 2})
    masks = [(one.sampling_mask_counts, one.sampling_mask_token_ids) for one in answer.completions]
    assert [decode(counts).tolist() for counts, _ in masks] == [[0, 2, 2], [0, 2, 2, 2]]
    assert [decode(ids).tolist() for _, ids in masks] == [[97, 98] * 2, [98, 99] * 3]
    answer = await generate(up, text="hi", sampling={"n": 2})
    assert not any(one.HasField("sampling_mask_counts") for one in answer.completions)


async def test_generate_refuses_masks_that_the_engine_cannot_tell(up):
    sentence = await refused(generate(up, True, text="hi"), grpc.StatusCode.FAILED_PRECONDITION)
    assert sentence.startswith("sampling_masks: this engine cannot tell the candidates of its tokens; allowed:")


@pytest.mark.parametrize(
    "prompt, field",
    [
        (experience_pb2.Prompt(text=""), "prompt.text"),
        (experience_pb2.Prompt(chat={}), "prompt.chat.messages"),
        (experience_pb2.Prompt(chat={"messages": [{"role": "assistant", "content": "x"}]}), "prompt.chat"),
        (experience_pb2.Prompt(text="x" * 64), "prompt.input"),
        (experience_pb2.Prompt(text="x", sampling={"max_new_tokens": -1}), "prompt.sampling.max_new_tokens"),
        (experience_pb2.Prompt(text="x", sampling={"top_p": 0.0}), "prompt"),
    ],
)
async def test_generate_refuses_bad_prompts(up, prompt, field):
    stream = up.stub.GenerateStream(rollout_pb2.GenerateStreamRequest(prompt=prompt), timeout=5)
    for call in (up.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=5), stream.read()):
        assert bad_field(await refusal(call, grpc.StatusCode.INVALID_ARGUMENT)) == field


async def test_a_chat_needs_a_chat_template(up, monkeypatch):
    monkeypatch.setattr(up.service.state.reader._tokenizer, "chat_template", None, raising=False)
    call = generate(up, chat={"messages": [{"role": "user", "content": "x"}]})
    assert "the model has no chat template" in await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
