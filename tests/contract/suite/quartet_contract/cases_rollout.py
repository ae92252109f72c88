"""RolloutService: status, weight updates and direct generation. `w.weights` is the trainer's side, see world."""

import grpc
import numpy as np
from quartet.v1 import experience_pb2, tensor_pb2
from quartet.v1 import rollout_pb2 as pb

from quartet_common.durations import to_duration
from quartet_common.tensors import decode, encode
from quartet_contract.cases import Bad, Case, Good, NoBadInput

INVALID, STATE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
LACKING, LOST = grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DATA_LOSS
PROMPT = np.array([17, 18, 19, 20], dtype=np.int32)
STATUS = pb.RolloutServiceGetStatusRequest()


def status(w):
    return w.call("RolloutService.GetStatus", STATUS)


def is_idle(w, answer):
    assert answer.run_id == "" and answer.engine == w.weights.engine  # its run does not exist
    assert answer.policy_version >= 0 and not answer.paused and answer.running == answer.waiting == 0
    assert answer.max_model_len == w.context and (0 <= answer.kv_cache_use <= 1 or answer.kv_cache_use == -1)
    assert any("run" in thing for thing in answer.waiting_for)


def with_weights(w, request):
    """The request, once the rollout has weights of a known version."""
    w.weights.ensure(w)
    return request


# Weight updates ------------------------------------------------------------------------------------------------------


def changed(request, **fields):
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def invitation(w, **fields):
    return changed(w.weights.invitation(), **fields)


def with_library(w):
    request = w.weights.invitation()
    request.libraries["nccl"] = "0.0.1"
    return request


def joined(w, answer):
    assert answer.ranks == 1
    w.weights.wait_until_met()
    assert status(w).group_epoch == w.weights.epoch


def is_paused(w, answer):
    assert answer.paused_completions == 0 and status(w).paused


def is_installed(w, answer):
    assert answer.policy_version == w.weights.version
    now = status(w)
    assert (now.policy_version, now.paused, now.group_epoch) == (w.weights.version, False, w.weights.epoch)


def old_weights_stand(w, answer):
    now = status(w)
    assert answer.policy_version == now.policy_version == w.kept.before and not now.paused


def begin(w, change=lambda manifest: None, **fields):
    request = changed(w.weights.join(w).announcement(), **fields)
    change(request.manifest)
    return request


def wrong_shape(manifest):
    tensor = next(tensor for tensor in manifest.tensors if "q_proj.weight" in tensor.name)
    tensor.shape[0] //= 2


def begun_abort(w):
    w.weights.ensure(w)
    w.kept.before = status(w).policy_version
    return w.weights.join(w).begin(w).surrender()


def other_version_begun(w):
    request = w.weights.join(w).begin(w).announcement()
    request.policy_version += 1
    return request


WEIGHTS: dict[str, list[Case]] = {
    "RolloutService.JoinWeightGroup": [
        Good("a new epoch", lambda w: w.weights.open().invitation(), joined),
        Bad(
            "an older epoch",
            lambda w: changed(w.weights.join(w).invitation(), group_epoch=w.weights.epoch - 1),
            STATE,
            "epoch",
        ),
        Bad("another NCCL", with_library, STATE, "nccl"),
        Bad("by NCCL, on a CPU", lambda w: invitation(w, transport=pb.WEIGHT_TRANSPORT_NCCL), LACKING, "transport"),
        Bad("as rank 0, the trainer's", lambda w: invitation(w, rank=0), INVALID, "rank"),
    ],
    "RolloutService.BeginWeightUpdate": [
        Good("in the epoch's group", begin, is_paused),
        Bad("while it receives another version", other_version_begun, STATE, "version"),
        Bad("a tensor of another shape", lambda w: begin(w, wrong_shape), INVALID, "manifest"),
    ],
    "RolloutService.FinishWeightUpdate": [
        Good("after the broadcast", lambda w: w.weights.join(w).begin(w).send().conclusion(), is_installed),
        Bad(
            "with another checksum",
            lambda w: changed(w.weights.join(w).begin(w).send().conclusion(), checksum=w.weights.checksum ^ 1),
            LOST,
            "checksum",
        ),
    ],
    "RolloutService.AbortWeightUpdate": [
        Good("before anything was sent", begun_abort, old_weights_stand),
        Bad("of another run", lambda w: changed(w.weights.join(w).surrender(), run_id="another"), STATE, "another"),
    ],
}


# Sleep ---------------------------------------------------------------------------------------------------------------


def is_awake(w, answer):
    now = status(w)
    assert now.sleep_level == 0 and answer.policy_version == now.policy_version


SLEEP: dict[str, list[Case]] = {
    "RolloutService.SetSleep": [
        Good("awake as it is", lambda w: with_weights(w, pb.SetSleepRequest(level=0)), is_awake),
        Bad("at level 3", lambda w: pb.SetSleepRequest(level=3), INVALID, "level"),
    ]
}


# Drain ---------------------------------------------------------------------------------------------------------------


def drain(w, **fields):
    return with_weights(w, pb.SetDrainRequest(draining=True, **fields))


def is_drained(w, answer):
    assert (answer.run_id, answer.finished, answer.given_back) == ("", 0, 0)
    assert any("drain" in thing for thing in status(w).waiting_for)


def is_drained_still(w, answer):
    is_drained(w, answer)
    works_again(w, w.call("RolloutService.SetDrain", pb.SetDrainRequest()))


def works_again(w, answer):
    assert (answer.finished, answer.given_back) == (0, 0)
    assert not any("drain" in thing for thing in status(w).waiting_for)


DRAIN: dict[str, list[Case]] = {
    "RolloutService.SetDrain": [
        Good("with nothing to finish", drain, is_drained, second=is_drained_still),
        Good("its end", lambda w: with_weights(w, pb.SetDrainRequest()), works_again),
        Bad("with a grace of two days", lambda w: drain(w, grace=to_duration(172800)), INVALID, "grace"),
    ]
}


# Generation ----------------------------------------------------------------------------------------------------------


def prompt(n=2, **fields) -> experience_pb2.Prompt:
    sampling = experience_pb2.SamplingParams(n=n, temperature=1.0, max_new_tokens=8, seed=7)
    return experience_pb2.Prompt(**{"token_ids": encode(PROMPT), "sampling": sampling} | fields)


def sampling(**fields) -> experience_pb2.Prompt:
    return prompt(sampling=experience_pb2.SamplingParams(**{"n": 1, "max_new_tokens": 4} | fields))


def is_whole(w, completion):
    """Tokens, log-probs and spans agree with one another and with the version the rollout has."""
    info, tokens, log_probs = completion.info, decode(completion.token_ids), decode(completion.log_probs)
    assert tokens.dtype == np.int32 and log_probs.dtype == np.float32
    assert tokens.shape == log_probs.shape == (info.tokens,) and 1 <= info.tokens <= 8
    assert (log_probs <= 0).all() and np.isfinite(log_probs).all()
    assert info.finish_reason == (
        experience_pb2.FINISH_REASON_STOP if tokens[-1] == w.end_token else experience_pb2.FINISH_REASON_LENGTH
    )
    assert info.text and not info.HasField("score")
    (span,) = info.version_spans
    assert (span.policy_version, span.begin, span.end) == (status(w).policy_version, 0, info.tokens)


def two_completions(w, answer):
    assert [completion.info.index for completion in answer.completions] == [0, 1]
    for completion in answer.completions:
        is_whole(w, completion)


def two_streamed(w, answers):
    assert sorted(answer.completion.info.index for answer in answers) == [0, 1]
    for answer in answers:
        is_whole(w, answer.completion)


def generate(w, value):
    return with_weights(w, pb.GenerateRequest(prompt=value))


def generate_stream(w, value):
    return with_weights(w, pb.GenerateStreamRequest(prompt=value))


def first_generated(w):
    """The tokens and log-probs of the first completion of `prompt`, which is seeded."""
    first = w.call("RolloutService.Generate", generate(w, prompt())).completions[0]
    return decode(first.token_ids), decode(first.log_probs)


def log_probs(w, **fields):
    given = {"prompt_token_ids": encode(PROMPT), "completion_token_ids": encode(first_generated(w)[0]), **fields}
    return pb.LogProbsRequest(**given)


def are_as_generated(w, answer):
    found, expected = decode(answer.log_probs), first_generated(w)[1]
    assert found.dtype == np.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-2)
    assert answer.policy_version == status(w).policy_version


CUT_SHORT = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[3], data=b"12345")

GENERATION: dict[str, list[Case]] = {
    "RolloutService.Generate": [
        Good("two, seeded", lambda w: generate(w, prompt()), two_completions),
        Bad("from nothing", lambda w: generate(w, experience_pb2.Prompt()), INVALID, "prompt"),
        Bad("from a tensor cut short", lambda w: generate(w, prompt(token_ids=CUT_SHORT)), INVALID, "prompt.token_ids"),
        Bad(
            "from more than the context holds",
            lambda w: generate(w, prompt(token_ids=encode(np.full(w.context, 17, dtype=np.int32)))),
            INVALID,
            "prompt",
        ),
        Bad("5000 times", lambda w: generate(w, sampling(n=5000)), INVALID, "prompt.sampling.n"),
    ],
    "RolloutService.GenerateStream": [
        Good("two, seeded", lambda w: generate_stream(w, prompt()), two_streamed),
        Bad("with a nucleus above 1", lambda w: generate_stream(w, sampling(top_p=1.5)), INVALID, "prompt"),
    ],
    "RolloutService.LogProbs": [
        Good("of what it generated", log_probs, are_as_generated),
        Bad("of nothing", lambda w: log_probs(w, completion_token_ids=None), INVALID, "completion_token_ids"),
        Bad(
            "after a tensor cut short",
            lambda w: log_probs(w, prompt_token_ids=CUT_SHORT),
            INVALID,
            "prompt_token_ids",
        ),
        Bad(
            "of more than the context holds",
            lambda w: log_probs(w, completion_token_ids=encode(np.full(w.context, 17, dtype=np.int32))),
            INVALID,
            "prompt",
        ),
        Bad("for another vocabulary", lambda w: log_probs(w, vocabulary="00"), STATE, "their tokens differ"),
    ],
}

CASES: dict[str, list[Case]] = {
    "RolloutService.GetStatus": [
        Good("without a run", lambda w: with_weights(w, STATUS), is_idle),
        NoBadInput("the request has no field, and there is a status in every state"),
    ],
    **WEIGHTS,
    **SLEEP,
    **DRAIN,
    **GENERATION,
}
