"""Each verifier by itself, on what is decided without a worker; and the parts that go by one."""

import asyncio
import doctest
import inspect
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import reward_pb2
from reward_samples import at_once, item, result_of, scorer, spec, tagged

from quartet_common.config import ConfigError
from quartet_common.errors import ContractError
from quartet_reward import metrics
from quartet_reward.begun import admitted
from quartet_reward.servicer import read_job
from quartet_reward.verifiers.base import Parameters, Verdict
from quartet_reward.verifiers.registry import load_verifiers

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
TIMED_OUT = reward_pb2.OUTCOME_TIMED_OUT


def score(name: str, completion: str, answer: str = "8", tokens: int = 0, **parameters) -> tuple[float, str]:
    """Reward and outcome, as the docstrings of verifiers show them."""
    verifiers = [spec(name, **parameters)]
    one = item(completion, answer, verifiers=verifiers, completion_tokens=tokens, max_new_tokens=tokens)
    found = at_once(one).score
    return found.reward, metrics.outcome_name(found.outcome)


@pytest.mark.parametrize("name", load_verifiers().keys() - {"code", "reward_model"})  # that need a worker
def test_every_verifier_does_what_its_docstring_shows(name):
    text = inspect.getdoc(type(load_verifiers()[name]))
    examples = doctest.DocTestParser().get_doctest(text, {"score": score}, name, None, None)
    assert examples.examples
    said = []
    doctest.DocTestRunner().run(examples, out=said.append)
    assert not said, "".join(said)


PAID = {
    # completion, reference answer, parameters, reward and outcome
    "think_answer_tags": (
        (tagged("8") + " <|im_end|>\n<|endoftext|><pad><pad></s><eos>\n", "8", {}, (10.0, "correct")),
        (tagged("9"), "8", {}, (0.0, "incorrect")),
        (tagged(""), "8", {}, (0.0, "malformed")),
        ("<answer>8</answer>", "8", {}, (0.0, "malformed")),
        (tagged("8"), "8", {"correct_reward": 1.0}, (1.0, "correct")),
        (tagged("9"), "8", {"format_reward": 0.1}, (0.1, "incorrect")),
        (tagged("8") + "<stop>", "8", {"special_tokens": ["<stop>"]}, (10.0, "correct")),
        (tagged("8") + "<eos>", "8", {"special_tokens": []}, (0.0, "malformed")),
    ),
    "boxed": (
        (r"\boxed{8} no: \boxed{7}", "8", {}, (0.0, "incorrect")),
        ("8", "8", {}, (0.0, "malformed")),
        (r"\boxed{\text{East}}", "east", {}, (10.0, "correct")),
        (r"\boxed{seat}", "east", {}, (0.0, "incorrect")),
    ),
    "math": (
        (r"<think>\boxed{9}</think> so \boxed{8}<|im_end|>", "8", {}, (10.0, "correct")),
        ("The answer is 8.", "8", {"correct_reward": 1}, (1.0, "correct")),
        ("I do not know.", "8", {}, (0.0, "malformed")),
        ("The answer is B.", r"\text{(B)}", {"choices": ["A", "B"]}, (10.0, "correct")),
    ),
    "exact": (
        (" 8 <eos>", "8", {}, (10.0, "correct")),
        (tagged("8"), "8", {"answer_in": "answer_tags", "correct_reward": 1}, (1.0, "correct")),
        ("8", "8", {"answer_in": "box"}, (0.0, "malformed")),
    ),
    "format": (
        (tagged("9"), "", {}, (1.0, "correct")),
        ("9", "", {}, (0.0, "malformed")),
        (r"\boxed{9}", "", {"form": "boxed", "reward": 0.5}, (0.5, "correct")),
    ),
}


@pytest.mark.parametrize(
    ("verifier", "completion", "answer", "parameters", "found"),
    [(verifier, *row) for verifier, rows in PAID.items() for row in rows],
)
def test_a_verifier_pays_for_what_it_requires(verifier, completion, answer, parameters, found):
    assert score(verifier, completion, answer, **parameters) == found


@pytest.mark.parametrize(
    ("tokens", "reward"), [(1, 0.0), (768, 0.0), (896, -5.0), (1023, -10 * 255 / 256), (1024, -10.0), (2000, -10.0)]
)
def test_length_falls_in_the_buffer_and_stays_down_past_the_limit(tokens, reward):
    found = at_once(item("x", verifier="length", completion_tokens=tokens, max_new_tokens=1024)).score
    assert found.reward == pytest.approx(reward) and found.unjudged


@pytest.mark.parametrize("verifier", ["think_answer_tags", "boxed", "exact"])
@pytest.mark.parametrize("completion", ["", "8", tagged("8"), r"\boxed{8}"])
def test_an_empty_reference_is_a_failure_whatever_the_completion(verifier, completion):
    failure = at_once(item(completion, " ", verifier=verifier)).failure
    assert failure.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE and not failure.retryable


def test_verifiers_are_weighed_and_summed():
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
    score = at_once(one).score
    assert score.reward == pytest.approx(0.5 * -0.5 + 2.0)
    assert score.outcome == INCORRECT  # of think_answer_tags: the first to judge answers
    assert score.format_acc == 1.0 and score.ans_acc == 0.0
    assert [part.name for part in score.verifiers] == ["length", "format", "think_answer_tags", "exact"]
    assert [part.reward for part in score.verifiers] == [-0.5, 2.0, 0.0, 0.0]
    assert not any(part.tests or part.HasField("tests_passed") for part in score.verifiers)


def boxed(**fields) -> reward_pb2.ScoreItem:
    return item("8", verifiers=[spec("boxed", **fields)])


def program(source: str, **limits) -> reward_pb2.ExecuteRequest:
    return reward_pb2.ExecuteRequest(source=source, limits=limits)


@pytest.mark.parametrize(
    ("read", "one", "field", "allowed"),
    [
        (at_once, item("8", verifier="boxd"), "item.verifiers[0].name", "did you mean 'boxed'"),
        (at_once, item("8", item_id="a" * 257), "item.item_id", "1 to 256"),
        (at_once, boxed(reward=1), "item.verifiers[0].parameters.reward", "correct_reward, string_match_reward"),
        (at_once, boxed(weight=float("nan")), "item.verifiers[0].weight", "finite"),
        (
            at_once,
            boxed(correct_reward=float("nan")),
            "item.verifiers[0].parameters.correct_reward",
            "got nan; allowed",
        ),
        (read_job, program("x" * ((1 << 20) + 1)), "source", "1 to 1048576 bytes"),
        (read_job, program("1", wall_time=Duration(seconds=601)), "limits.wall_time", "0.1 s to 600 s"),
        (read_job, program("1", output_bytes=-1), "limits.output_bytes", "1 to 16777216"),
    ],
)
def test_what_cannot_be_accepted_is_refused_by_field(read, one, field, allowed):
    with pytest.raises(ContractError) as refused:
        read(one)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.message.startswith(field + ":") and allowed in refused.value.message


class Expression(Parameters):
    value: str
    later: bool = False


class Polite:
    """A user's verifier: it answers what it is asked for."""

    name = "polite"
    description = "Says please."
    parameters: type[Parameters] = Expression

    async def verify(self, item, parameters, tools):
        if parameters.later:
            await admitted()
        return eval(parameters.value)


class Hasty(Polite):
    """It waits in place of its call's task, where a timeout would end the call."""

    async def verify(self, item, parameters, tools):
        async with asyncio.timeout(1):
            await asyncio.sleep(0.5)


async def test_one_that_waits_before_it_is_admitted_fails_its_item_alone():
    failure = at_once(item("x", verifiers=[spec("polite", value="1")]), scorer(verifiers={"polite": Hasty()})).failure
    assert "raised RuntimeError: await quartet_reward.begun.admitted() before anything else" in failure.message


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def fail(error):
    raise error


async def test_one_that_raises_is_a_failure_with_its_place_and_never_a_number(caplog):
    line = inspect.getsource(Polite).splitlines().index("        return eval(parameters.value)")
    place = f"{__file__}:{inspect.getsourcelines(Polite)[1] + line}"
    one, by = item("x", verifiers=[spec("polite", value="1 / 0")]), scorer(verifiers={"polite": Polite()})
    failure = at_once(one, by).failure
    assert failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED and failure.retryable
    assert failure.message == f"verifier 'polite' raised ZeroDivisionError: division by zero ({place})"
    assert failure.place == place and failure.traceback.endswith("ZeroDivisionError: division by zero\n")
    at_once(one, by)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]  # its traceback once
    assert record.getMessage() == failure.message and record.place == place and record.exc_info


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('Verdict(float("nan"), 1, "")', "its reward is nan; it must be finite"),
        ("Verdict('1', 1, '')", "TypeError"),
        ("Verdict(1e300, 1, '')", "the weighted sum of the rewards is 1e+300"),
        ("Verdict(1.0, 99, '')", "no name defined for value 99"),
        ("exit(3)", "SystemExit: 3"),
        ("fail(Unprintable())", "Unprintable: its text cannot be made (RuntimeError)"),
        ("fail(KeyError('\\ud800' * 10**6))", "KeyError: '\\ud800"),
    ],
)
async def test_whatever_one_does_is_the_failure_of_its_item(value, message, later):
    one = item("x", verifiers=[spec("polite", value=value, later=later)])
    failure = (await result_of(one, scorer(verifiers={"polite": Polite()}))).failure
    assert failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED
    assert message in failure.message and len(failure.message) <= 1000


UNJUDGED = reward_pb2.OUTCOME_UNJUDGED
JUDGES = {
    "length": lambda: Verdict(-1.0, UNJUDGED, ""),
    "form": lambda: Verdict(1.0, CORRECT, "", format_acc=1.0),
    "right": lambda: Verdict(1.0, CORRECT, ""),
    "wrong": lambda: Verdict(1.0, TIMED_OUT, ""),
    "half": lambda: Verdict(1.0, INCORRECT, "", ans_acc=0.5),
}


@pytest.mark.parametrize(
    ("verdicts", "accuracy", "outcome"),
    [
        (["length"], None, UNJUDGED),
        (["form", "length"], None, CORRECT),
        (["form", "wrong", "right"], 0.5, TIMED_OUT),
        (["right", "half"], 0.5, INCORRECT),
    ],
)
def test_accuracy_comes_from_the_outcome_where_no_verifier_gives_one(verdicts, accuracy, outcome):
    class Judge(Polite):
        parameters = Parameters

        def __init__(self, name):
            self.name = name

        async def verify(self, item, parameters, tools):
            return JUDGES[self.name]()

    judges = scorer(verifiers={name: Judge(name) for name in JUDGES})
    score = at_once(item("x", verifiers=[spec(name) for name in verdicts]), judges).score
    assert (None if score.unjudged else score.ans_acc, score.outcome) == (accuracy, outcome)


@pytest.mark.parametrize(
    ("thing", "complaint"),
    [
        (type("Boxed", (Polite,), {"name": "boxed"}), "'boxed' is taken"),
        (object, "lacks name"),
        (
            type("Sync", (Polite,), {"verify": lambda *_: None}),
            "verifier 'polite' of .*: write its verify as `async def`",
        ),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_an_unusable_entry_point_is_named(thing, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_verifiers(points=[SimpleNamespace(value="somewhere:Polite", load=lambda: thing)])
