"""Each verifier by itself, on what is decided without a worker; and the parts that go by one."""

import doctest
import inspect
from types import SimpleNamespace

import pytest
from quartet.v1 import reward_pb2
from reward_samples import decided, item, scored, spec, tagged

from quartet_common.config import ConfigError
from quartet_reward.errors import VerifierFailure
from quartet_reward.math.equality import MathEquality
from quartet_reward.scoring import Scorer
from quartet_reward.verifiers.base import Parameters, Tools, Verdict
from quartet_reward.verifiers.registry import SpecReader, load_verifiers

CORRECT, INCORRECT = reward_pb2.OUTCOME_CORRECT, reward_pb2.OUTCOME_INCORRECT
MALFORMED, TIMED_OUT = reward_pb2.OUTCOME_MALFORMED, reward_pb2.OUTCOME_TIMED_OUT


def score(name: str, completion: str, answer: str = "8", tokens: int = 0, **parameters) -> tuple[float | None, str]:
    """Reward and outcome, as the docstrings of verifiers show them."""
    verdict = decided(
        item(completion, answer, verifiers=[spec(name, **parameters)], completion_tokens=tokens, max_new_tokens=tokens)
    )
    return verdict.reward, reward_pb2.Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower()


@pytest.mark.parametrize("name", load_verifiers().keys() - {"code", "reward_model"})  # that need a worker
def test_every_verifier_does_what_its_docstring_shows(name):
    text = inspect.getdoc(type(load_verifiers()[name]))
    examples = doctest.DocTestParser().get_doctest(text, {"score": score}, name, None, None)
    assert examples.examples
    said = []
    doctest.DocTestRunner().run(examples, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize(
    ("completion", "reward", "outcome"),
    [
        (tagged("8"), 10.0, CORRECT),
        (tagged("8") + " <|im_end|>\n<|endoftext|><pad><pad></s><eos>\n", 10.0, CORRECT),
        (tagged(r"\boxed{8}"), 10.0, CORRECT),
        (tagged("8.0"), 10.0, CORRECT),
        (tagged(r"\boxed{7} \boxed{8}"), 10.0, CORRECT),
        (tagged("9"), 0.0, INCORRECT),
        (tagged(""), 0.0, MALFORMED),
        (tagged("8") + " indeed", 0.0, MALFORMED),
        ("<answer>8</answer>", 0.0, MALFORMED),
        ("", 0.0, MALFORMED),
    ],
)
def test_think_answer_tags_pays_for_the_right_answer_in_the_right_form(completion, reward, outcome):
    assert scored(completion, "think_answer_tags") == (reward, outcome)


def test_a_verdict_says_what_was_read_and_judges_form_and_answer():
    found = decided(item(tagged("9")))
    assert (found.parsed_answer, found.format_acc, found.ans_acc) == ("9", 1.0, 0.0)
    found = decided(item("<answer>8</answer>"))
    assert (found.parsed_answer, found.format_acc, found.ans_acc) == ("8", 0.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "reward", "outcome"),
    [
        (r"so \boxed{8}", 10.0, CORRECT),
        (r"\boxed{7} no: \boxed{8}.<|im_end|>", 10.0, CORRECT),
        (r"\boxed{8} no: \boxed{7}", 0.0, INCORRECT),
        (r"<think>\boxed{8}</think>\boxed{7}", 0.0, INCORRECT),
        (r"<think>\boxed{8}</think>", 0.0, MALFORMED),
        (r"\boxed{}", 0.0, MALFORMED),
        ("8", 0.0, MALFORMED),
    ],
)
def test_boxed_pays_for_the_last_box_after_the_thought(completion, reward, outcome):
    assert scored(completion, "boxed") == (reward, outcome)


@pytest.mark.parametrize(
    ("completion", "verifier", "answer", "parameters", "found"),
    [
        (tagged("8"), "think_answer_tags", "8", {"correct_reward": 1.0}, (1.0, CORRECT)),
        (tagged("9"), "think_answer_tags", "8", {"format_reward": 0.1}, (0.1, INCORRECT)),
        ("9", "think_answer_tags", "8", {"format_reward": 0.1}, (0.0, MALFORMED)),
        (tagged("8") + "<stop>", "think_answer_tags", "8", {"special_tokens": ["<stop>"]}, (10.0, CORRECT)),
        (tagged("8") + "<eos>", "think_answer_tags", "8", {"special_tokens": []}, (0.0, MALFORMED)),
        (tagged("1+" * 500_000 + "1"), "think_answer_tags", "8", {}, (0.0, INCORRECT)),
        (r"\boxed{\text{East}}", "boxed", "east", {}, (10.0, CORRECT)),
        (r"\boxed{seat}", "boxed", "east", {}, (0.0, INCORRECT)),
        (" 8 <eos>", "exact", "8", {}, (10.0, CORRECT)),
        ("8.0", "exact", "8", {}, (0.0, INCORRECT)),
        ("", "exact", "8", {}, (0.0, MALFORMED)),
        ("Paris", "exact", "paris", {"ignore_case": True}, (10.0, CORRECT)),
        (tagged("8"), "exact", "8", {"answer_in": "answer_tags", "correct_reward": 1}, (1.0, CORRECT)),
        (r"\boxed{8}", "exact", "8", {"answer_in": "box"}, (10.0, CORRECT)),
        ("8", "exact", "8", {"answer_in": "box"}, (0.0, MALFORMED)),
        (tagged("9"), "format", "", {}, (1.0, CORRECT)),
        ("9", "format", "", {}, (0.0, MALFORMED)),
        (r"\boxed{9}", "format", "", {"form": "boxed", "reward": 0.5}, (0.5, CORRECT)),
    ],
)
def test_parameters_say_what_is_paid_for(completion, verifier, answer, parameters, found):
    assert scored(completion, verifier, answer, **parameters) == found


@pytest.mark.parametrize(
    ("tokens", "reward"), [(1, 0.0), (768, 0.0), (896, -5.0), (1023, -10 * 255 / 256), (1024, -10.0), (2000, -10.0)]
)
def test_length_falls_in_the_buffer_and_stays_down_past_the_limit(tokens, reward):
    found = decided(item("x", verifier="length", completion_tokens=tokens, max_new_tokens=1024))
    assert found.reward == pytest.approx(reward)
    assert found.format_acc is None and found.ans_acc is None


def test_length_takes_its_numbers_from_parameters():
    one = item("x", completion_tokens=95, verifiers=[spec("length", penalty=1.0, max_tokens=100, buffer_tokens=10)])
    assert decided(one).reward == pytest.approx(-0.5)
    with pytest.raises(VerifierFailure, match="completion_tokens: got 0"):
        decided(item("x", verifier="length"))


@pytest.mark.parametrize("verifier", ["think_answer_tags", "boxed", "exact"])
@pytest.mark.parametrize("completion", ["", "8", tagged("8"), r"\boxed{8}"])
def test_an_empty_reference_is_a_failure_whatever_the_completion(verifier, completion):
    with pytest.raises(VerifierFailure) as caught:
        decided(item(completion, " ", verifier=verifier))
    assert caught.value.kind == reward_pb2.FAILURE_KIND_BAD_REFERENCE
    assert not caught.value.retryable


class Polite:
    """A user's verifier."""

    name = "polite"
    description = "Says please."
    parameters = Parameters

    def verify(self, item, parameters, tools):
        """Not called here."""


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
        (["length", "right"], 1.0, CORRECT),
        (["form", "wrong", "right"], 0.5, TIMED_OUT),
        (["right", "half"], 0.5, INCORRECT),
    ],
)
def test_accuracy_comes_from_the_outcome_where_no_verifier_gives_one(verdicts, accuracy, outcome):
    class Judge(Polite):
        def __init__(self, name):
            self.name = name

        def verify(self, item, parameters, tools):
            return JUDGES[self.name]()

    scorer = Scorer(SpecReader({name: Judge(name) for name in JUDGES}), Tools(MathEquality(None)))
    asked = item("x", verifiers=[spec(name) for name in verdicts])
    score = scorer.score(asked, "item", asked.ByteSize()).score
    assert (None if score.unjudged else score.ans_acc, score.outcome) == (accuracy, outcome)


@pytest.mark.parametrize(
    ("thing", "complaint"),
    [
        (type("Boxed", (Polite,), {"name": "boxed"}), "'boxed' is taken"),
        (object, "lacks name"),
        (type("Odd", (Polite,), {"parameters": dict}), "must be a subclass"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_an_unusable_entry_point_is_named(thing, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_verifiers(points=[SimpleNamespace(value="somewhere:Polite", load=lambda: thing)])
