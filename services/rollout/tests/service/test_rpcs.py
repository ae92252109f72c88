"""RolloutService over real sockets: what the contract's cases do not send. One rollout answers all of it."""

import grpc
import pytest
import pytest_asyncio
from doubles import InTestBroker
from quartet.v1 import experience_pb2, rollout_pb2
from world import neighbors, refused

from quartet_common.durations import to_duration
from quartet_common.tensors import decode
from quartet_rollout.engines import ManifestError

pytestmark = pytest.mark.asyncio(loop_scope="module")
INVALID, LACKING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
CUSTOM = rollout_pb2.WEIGHT_TRANSPORT_CUSTOM


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory):
    broker = InTestBroker()
    broker.create_run()
    async with neighbors(tmp_path_factory.mktemp("model"), broker) as make:
        world = make()
        world.engine.policy_version = 0
        await world.ready()
        yield world


async def test_an_invitation_or_update_that_does_not_fit_is_refused_by_field(up, monkeypatch):
    for fields, code, words in (
        ({"store_host": ""}, INVALID, "store_host"),
        ({"timeout": to_duration(1e9)}, INVALID, "timeout"),
        ({"transport": CUSTOM, "transport_name": "gloo"}, INVALID, "transport_name"),
        ({"transport": rollout_pb2.WEIGHT_TRANSPORT_FILE}, LACKING, "cannot receive by file"),
        ({"transport": CUSTOM, "transport_name": "pigeon"}, LACKING, "the package with the entry point 'pigeon' of"),
    ):
        assert words in await refused(up.join(**fields), code)
    await up.join()
    assert "policy_version" in await refused(up.begin(2**53), INVALID)
    monkeypatch.setitem(up.engine.errors, "check_manifest", ManifestError("tensor 'w' is not in this model"))
    assert "tensor 'w' is not in this model" in await refused(up.begin(1), INVALID)
    assert up.engine.unpaused.is_set() and not up.service.state.paused


def generate(up, masks: bool = False, **prompt):
    request = rollout_pb2.GenerateRequest(prompt=experience_pb2.Prompt(**prompt), sampling_masks=masks)
    return up.stub.Generate(request, timeout=5)


async def test_generate_returns_sampling_masks_when_asked_of_an_engine_that_has_them(up, monkeypatch):
    sentence = await refused(generate(up, True, text="hi"), grpc.StatusCode.FAILED_PRECONDITION)
    assert sentence.startswith("sampling_masks: this engine does not return the candidates of its tokens; allowed:")
    monkeypatch.setattr(up.engine, "gives_masks", True)
    answer = await generate(up, True, text="hi", sampling={"n": 2})
    masks = [(one.sampling_mask_counts, one.sampling_mask_token_ids) for one in answer.completions]
    assert [decode(counts).tolist() for counts, _ in masks] == [[0, 2, 2], [0, 2, 2, 2]]
    assert [decode(ids).tolist() for _, ids in masks] == [[97, 98] * 2, [98, 99] * 3]


async def test_a_chat_that_the_template_refuses_or_that_has_none_is_refused(up, monkeypatch):
    def chat(*roles: str):
        return generate(up, chat={"messages": [{"role": role, "content": "x"} for role in roles]})

    assert "prompt.chat.messages" in await refused(chat(), INVALID)
    assert "the last turn must be the user's" in await refused(chat("developer"), INVALID)
    monkeypatch.setattr(up.service.state.reader._tokenizer, "chat_template", None, raising=False)
    assert "the model has no chat template" in await refused(chat("user"), INVALID)
