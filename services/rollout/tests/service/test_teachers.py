"""Teachers over real sockets: their log-probs are stored with the group, and what becomes of one that fails."""

import grpc
import numpy as np
import pytest
from doubles import InTestBroker
from quartet.v1 import broker_pb2, experience_pb2, rollout_pb2, tensor_pb2
from world import instance, neighbors, refused

from quartet_common.config import SecuritySection, TeacherSection
from quartet_common.errors import describe
from quartet_common.handshake import WaitingFor
from quartet_common.tensors import decode, decode_ragged, encode, encode_ragged
from quartet_rollout.teachers import Teachers
from quartet_rollout.vocabulary import vocabulary_digest


@pytest.fixture
async def worlds(tmp_path):
    broker = InTestBroker()
    broker.create_run(teachers=["big", "small"])
    async with neighbors(tmp_path, broker) as make:
        yield make


@pytest.fixture
async def teacher(worlds):
    world = worlds()
    await world.start(standalone=True)
    await world.until(lambda: world.service.state.engine is not None)
    return world


@pytest.fixture
async def student(worlds, teacher):
    world = worlds()
    world.engine.policy_version = 0
    await world.start(teachers={"big": teacher.host.address, "small": teacher.host.address})
    return world


def request(prompt=(5, 6), completion=(7, 8, 9), **fields):
    ids = {"prompt_token_ids": prompt, "completion_token_ids": completion}
    arrays = {name: encode(np.array(tokens, np.int32)) for name, tokens in ids.items()}
    return rollout_pb2.LogProbsRequest(**{**arrays, **fields})


async def test_standalone_rollout_serves_its_weights_and_joins_no_run(teacher):
    response = await teacher.stub.LogProbs(request(vocabulary=vocabulary_digest(teacher.engine.tokenizer())), timeout=5)
    np.testing.assert_allclose(decode(response.log_probs), [-2.07, -3.08, -4.09], rtol=1e-6)
    assert response.policy_version == 0
    assert (await teacher.status()).waiting_for == []
    assert not teacher.broker.calls, "it is no member"
    assert await teacher.stop() == 0


@pytest.mark.parametrize("field", ["prompt", "completion"])
async def test_a_token_that_the_model_lacks_is_refused_by_its_field(teacher, field):
    call = teacher.stub.LogProbs(request(**{field: (5, 128)}), timeout=5)
    said = await refused(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert f"{field}_token_ids: got token id 128; allowed: 0 to 127" in said


async def test_training_groups_are_stored_with_log_probs_of_their_teacher(student):
    await student.put(instance())
    (row,) = decode_ragged(student.broker.tensors().teacher_log_probs)[:1]
    prompt = len("1+1=?")
    np.testing.assert_allclose(row, [-0.97 - prompt - at for at in range(3)], rtol=1e-6)
    await student.put(instance("heldout/0", purpose=experience_pb2.PURPOSE_EVALUATE))
    assert not student.broker.tensors(1).HasField("teacher_log_probs")


async def test_prompt_names_its_teacher_and_an_unknown_one_is_refused(student):
    known, unknown = instance("pass-0/1"), instance("pass-0/2")
    known.prompt.teacher, unknown.prompt.teacher = "small", "huge"
    await student.put(known)
    release = await student.release(unknown)
    assert (
        release.permanent and "prompt.teacher: got 'huge'; allowed: one of run.teachers: big, small" in release.failure
    )


async def test_rows_of_agents_are_judged_after_their_own_prompts(teacher):
    rows, prompts = ([7], [8, 9], []), ([5, 5], [6])
    tensors = experience_pb2.GroupTensors(
        prompts=encode_ragged([np.array(one) for one in prompts], tensor_pb2.DTYPE_INT32),
        row_prompts=encode(np.array([1, 0, 1], np.int32)),
        completion_token_ids=encode_ragged([np.array(one, np.int32) for one in rows], tensor_pb2.DTYPE_INT32),
    )
    teachers = Teachers({"big": TeacherSection(address=teacher.host.address)}, SecuritySection(), WaitingFor())
    await teachers.judge(experience_pb2.Prompt(), broker_pb2.RunSpec(teachers=["big"]), tensors, "")
    await teachers.close()
    found = decode_ragged(tensors.teacher_log_probs)
    for row, expected in zip(found, ([-1.07], [-2.08, -3.09], []), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-6)


async def test_group_waits_for_a_teacher_that_is_away(student, teacher):
    teacher.address = teacher.host.address
    await teacher.stop()
    await student.broker.submit(instance())
    await student.until(lambda: any("teacher 'big'" in one for one in student.host.waiting))
    assert not student.broker.releases and not student.broker.puts
    await teacher.start(standalone=True)
    await student.broker.until(lambda: student.broker.puts)


async def test_group_that_a_teacher_refuses_is_set_aside_with_its_completions(student, teacher, monkeypatch):
    monkeypatch.setattr(type(teacher.engine.tokenizer()), "get_vocab", lambda self: {"a": id(self) % 997})
    vocabulary_digest.cache_clear()
    release = await student.release(instance())
    vocabulary_digest.cache_clear()
    assert release.permanent and "their tokens differ" in release.failure
    kept = experience_pb2.UnscoredGroup.FromString(release.unscored)
    assert len(experience_pb2.GroupTranscript.FromString(kept.group.transcript).completions) == 2
    monkeypatch.undo()
    await student.put(instance())
    assert len(student.engine.requests) == 1, "nothing was drawn again"
    assert student.broker.tensors().HasField("teacher_log_probs")


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.7), ("top_p", 0.9), ("min_tokens", 2)])
async def test_sampling_that_a_teacher_cannot_judge_is_refused(student, key, value):
    one = instance()
    setattr(one.prompt.sampling, key, value)
    release = await student.release(one)
    assert release.permanent and f"sampling.{key}" in release.failure and "a teacher judges" in release.failure


async def test_rollout_without_the_address_of_a_teacher_ends_with_the_cure(worlds, caplog):
    world = worlds()
    world.engine.policy_version = 0
    await world.start()
    await world.until(lambda: world.host.stopping.is_set())
    assert world.host.exit_code == 1
    assert "no address; set run.teachers.big.address in its run file" in caplog.text


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (request(completion=()), grpc.StatusCode.INVALID_ARGUMENT, "at least one token"),
        (request(prompt_token_ids=encode(np.array([1.5]))), grpc.StatusCode.INVALID_ARGUMENT, "float64 of shape [1]"),
        (request(vocabulary="00"), grpc.StatusCode.FAILED_PRECONDITION, "a teacher needs the policy's tokenizer"),
    ],
    ids=["no token", "another dtype", "another vocabulary"],
)
async def test_unusable_request_is_refused_by_field(teacher, asked, code, message):
    assert message in await refused(teacher.stub.LogProbs(asked, timeout=5), code)


async def test_requests_wait_for_their_turn_and_too_many_are_told_when_to_come_again(worlds):
    world = worlds()
    world.engine.unpaused.clear()
    await world.start(standalone=True, max_direct_completions=1, max_direct_queued=1)
    await world.until(lambda: world.service.state.engine is not None)
    calls = [world.stub.LogProbs(request(), timeout=20)]
    await world.until(lambda: world.service.admission.running == 1)
    calls.append(world.stub.LogProbs(request(), timeout=20))
    await world.until(lambda: world.service.admission.waiting == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.stub.LogProbs(request(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "1 wait" in describe(caught.value)
    world.engine.unpaused.set()
    for call in calls:
        assert decode((await call).log_probs).size == 3
