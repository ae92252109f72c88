"""Environments of the package verifiers, played by the service: their rewards and seats, and what is no reward."""

import asyncio
import datetime
import ipaddress
import itertools
import json
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from episodes import serving
from model_endpoint import model_endpoint
from quartet.v1 import environment_pb2

from quartet_environment.agent import Endpoint, Task
from quartet_environment.failures import of_exception
from quartet_environment.function import Function, InvalidParameter
from quartet_environment.seats import NoReward, read_result

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def verifiers() -> Function:
    """What a worker process loads: here in this process, because an import takes seconds."""
    return Function("verifiers")


def first_task(verifiers: Function, parameters: dict[str, Any]) -> dict[str, Any]:
    given = {name: parameters[name] for name in ("id", "taskset") if name in parameters}
    return next(verifiers.tasks(verifiers.check(given)))


async def play(
    verifiers: Function,
    url: str,
    key: str = "episode-key",
    task: dict[str, Any] | None = None,
    ca_file: str = "",
    **parameters: Any,
) -> environment_pb2.EpisodeResult:
    """Play the first task."""
    data = json.loads(json.dumps(task or first_task(verifiers, parameters)))
    checked = verifiers.check(parameters)
    given = Task("p", data, [], "", checked, 0, {"temperature": 1.0, "max_tokens": 64})
    endpoint = Endpoint(url, key, "policy", ca_file)
    return environment_pb2.EpisodeResult(**read_result(await verifiers.play(given, endpoint, checked)))


def rewards(seat: environment_pb2.SeatResult) -> dict[str, tuple[float, float]]:
    return {one.name: (one.value, round(one.weight, 6)) for one in seat.rewards}


async def test_an_episode_keeps_rewards_by_name_and_its_session(verifiers):
    with model_endpoint() as (url, calls):
        (seat,) = (await play(verifiers, url, id="phrases")).seats
    assert (seat.name, seat.trainable, rewards(seat)) == ("agent", True, {"repeated": (1, 1), "short": (1, 0.1)})
    (call,) = calls
    assert list(seat.sessions) == [call["headers"]["x-session-id"]]
    assert call["path"] == "/v1/chat/completions"
    assert call["headers"]["authorization"] == "Bearer episode-key"
    assert [one["role"] for one in call["body"]["messages"]] == ["system", "user"]


async def test_episodes_at_once_use_their_own_keys(verifiers):
    with model_endpoint() as (url, calls):
        keys = [f"key-{number}" for number in range(8)]
        played = await asyncio.gather(*(play(verifiers, url, key, id="phrases") for key in keys))
    expected = {one.seats[0].sessions[0]: f"Bearer {key}" for one, key in zip(played, keys, strict=True)}
    assert {call["headers"]["x-session-id"]: call["headers"]["authorization"] for call in calls} == expected


async def test_seats_are_told_apart_by_the_sessions_of_their_calls(verifiers):
    with model_endpoint() as (url, calls):
        seats = {seat.name: seat for seat in (await play(verifiers, url, id="duel")).seats}
    assert {name: (seat.trainable, rewards(seat)) for name, seat in seats.items()} == {
        "first": (True, {"won": (1, 1)}),
        "second": (True, {"won": (0, 1)}),
        "referee": (False, {}),
    }
    sessions = {seat.sessions[0]: name for name, seat in seats.items()}
    assert [sessions[call["headers"]["x-session-id"]] for call in calls] == ["first", "second"] * 2 + ["referee"]
    assert len(calls[2]["body"]["messages"]) == 3  # its own turn before, and no word of the other's


async def test_the_run_may_choose_the_trained_seats(verifiers):
    with model_endpoint() as (url, _):
        answer = await play(verifiers, url, id="duel", trainable=["second"], env={"referee": {"max_turns": 1}})
    assert {seat.name for seat in answer.seats if seat.trainable} == {"second"}


@pytest.mark.timeout(360)  # several processes import verifiers, each for ten seconds of CPU time
async def test_tools_are_called_and_shared_ones_outlive_an_episode(verifiers):
    with model_endpoint() as (url, calls):
        first = rewards((await play(verifiers, url, id="counter")).seats[0])
        second = rewards((await play(verifiers, url, id="counter")).seats[0])
    assert first["counted"] == second["counted"] == (2, 1)
    assert first["server"] == second["server"]
    assert len(calls) == 8
    assert calls[3]["body"]["messages"][-1]["content"] == str(int(first["server"][0]))


async def test_a_tokenizer_sends_tokens(verifiers, tmp_path):
    with model_endpoint() as (url, calls):
        answer = await play(
            verifiers, url, id="phrases", tokenizer=str(tokenizer(tmp_path)), renderer={"name": "default"}
        )
    (seat,) = answer.seats
    assert rewards(seat)["repeated"] == (1, 1)
    (call,) = calls
    assert call["path"] == "/inference/v1/generate"
    assert call["headers"]["x-session-id"] == seat.sessions[0]
    assert call["headers"]["authorization"] == "Bearer episode-key"


def tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[END]", "[TURN]", "Say", "ping", "Repeat."]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[END]", unk_token="[UNK]")
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}[TURN]"
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tokens", "before"), [(False, ""), (True, certifi.where())])
async def test_an_endpoint_of_a_private_authority_is_trusted(verifiers, tmp_path, monkeypatch, tokens, before):
    monkeypatch.setenv("SSL_CERT_FILE", before)  # restored afterwards
    certificate = private_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    renders = {"tokenizer": str(tokenizer(tmp_path)), "renderer": {"name": "default"}} if tokens else {}
    with model_endpoint(tls=tls) as (url, calls):
        failure = await failed(play(verifiers, url, id="phrases", **renders))
        assert "ProviderError" in failure["message"] and failure["retryable"] and not calls
        answer = await play(verifiers, url, ca_file=str(certificate), id="phrases", **renders)
    assert rewards(answer.seats[0])["repeated"] == (1, 1)
    assert [call["path"] for call in calls] == ["/inference/v1/generate" if tokens else "/v1/chat/completions"]


def private_certificate(folder: Path) -> Path:
    """A file with the key and the certificate of 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "private")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    made = built.add_extension(host, False).add_extension(x509.BasicConstraints(True, None), True)
    path = folder / "private.pem"
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(*private) + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.mark.parametrize(
    ("parameters", "status", "said", "retryable"),
    [
        ({"id": "phrases"}, 503, "ProviderError: upstream 503: ", True),
        ({"id": "phrases"}, 400, "no more today", False),
        ({"id": "phrases", "taskset": {"fault": "reward"}}, 200, "ZeroDivisionError: scored by nothing", False),
        ({"id": "phrases", "taskset": {"fault": "setup"}}, 200, "TaskError: task setup: KeyError", False),
        (
            {"id": "phrases", "taskset": {"fault": "slow"}, "env": {"agent": {"timeout": {"setup": 0.2}}}},
            200,
            "seat 'agent' ended by setup_timeout",
            True,
        ),
        ({"id": "duel", "env": {"timeout": {"episode": 0.001}}}, 200, "exceeded its 0.001s deadline", True),
        ({"id": "duel", "taskset": {"second_speaks": False}}, 200, "seat 'second' sampled no token", True),
        ({"id": "duel", "trainable": ["referee"]}, 200, "Reward whose value of seat 'referee' is empty", False),
    ],
)
async def test_a_failure_is_no_reward(verifiers, parameters, status, said, retryable):
    with model_endpoint(status) as (url, _):
        failure = await failed(play(verifiers, url, **parameters))
    assert said in failure["message"]
    assert failure["retryable"] is retryable, failure["message"]


async def failed(playing) -> dict[str, Any]:
    """What the worker process says of an episode."""
    with pytest.raises(Exception) as caught:
        await playing
    if isinstance(caught.value, NoReward):
        return {"message": str(caught.value), "retryable": False}
    return of_exception("verifiers", "", caught.value)


async def test_an_endpoint_that_is_away_is_tried_again(verifiers):
    failure = await failed(play(verifiers, "http://127.0.0.1:9/v1", id="phrases"))
    assert failure["retryable"] and "ProviderError" in failure["message"]


async def test_a_task_of_another_taskset_is_refused(verifiers):
    with model_endpoint() as (url, calls):
        failure = await failed(play(verifiers, url, task={"n": 1}, id="phrases"))
    assert "answer" in failure["message"] and not failure["retryable"] and not calls


@pytest.mark.parametrize(
    ("parameters", "key", "said"),
    [
        ({"id": "frases"}, "id", "taskset 'frases' not found"),
        ({"id": "phrases", "taskset": {"phases": ["a"]}}, "env", "taskset.phases"),
        ({"id": "phrases", "env": {"agents": {"max_turns": 1}}}, "env", "agents"),
        ({"id": "duel", "trainable": ["third"]}, "trainable", "seats of the environment: first, second, referee"),
        ({"id": "phrases", "env": {"retries": {"max_retries": 2}}}, "env", "env.retries is set; allowed: none"),
        ({"id": "phrases", "env": {"agent": {"retries": {"max_retries": 2}}}}, "env", "agent.retries is set"),
        ({"idd": "phrases"}, "id", "field required"),
    ],
)
async def test_the_dry_run_names_what_is_wrong(verifiers, parameters, key, said):
    with pytest.raises(InvalidParameter) as caught:
        verifiers.check(parameters)
    assert caught.value.key == key and said in caught.value.allowed


@pytest.mark.timeout(360)  # several processes import verifiers, each for ten seconds of CPU time
async def test_the_service_gives_its_tasks_and_plays_them():
    parameters = {"id": "phrases", "taskset": {"phrases": ["a", "b"]}}
    request = environment_pb2.ListTasksRequest(environment="verifiers")
    request.parameters.update(parameters)
    with model_endpoint() as (url, _):
        async with serving("environment.workers=1") as service:
            answers = [answer async for answer in service.stub.ListTasks(request, timeout=60)]
            prompts = list(itertools.chain.from_iterable(answer.prompts for answer in answers))
            answer = await service.play("verifiers", prompt=prompts[1], parameters=parameters, url=url)
    assert [json.loads(prompt.task)["answer"] for prompt in prompts] == ["a", "b"]
    assert rewards(answer.finished.seats[0])["repeated"] == (1, 1)
