"""A user's own verifier: a distribution as an installer leaves it, found by its entry point, served over a socket."""

import sys
from importlib import metadata
from pathlib import Path

from quartet.v1 import reward_pb2
from reward_samples import begun, item, scorer, serving, spec, tagged

POLITE = """
from pydantic import Field
from quartet.v1 import reward_pb2
from quartet_reward.verifiers.base import Parameters, Verdict


class PoliteParameters(Parameters):
    reward: float = Field(1.0, description="Reward of a polite completion.")


class Polite:
    name = "polite"
    description = "The completion says please."
    parameters = PoliteParameters

    def verify(self, item, parameters, tools):
        if "please" in item.completion:
            return Verdict(parameters.reward, reward_pb2.OUTCOME_CORRECT, "it says please")
        return Verdict(0.0, reward_pb2.OUTCOME_INCORRECT, "it does not say please")
"""


def install(folder: Path, monkeypatch, source: str) -> None:
    """Leave what an installer leaves: a module, its metadata and its entry points, on the path."""
    (folder / "my_package.py").write_text(source)
    information = folder / "my_package-1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[quartet.verifiers]\npolite = my_package:Polite\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    assert metadata.version("my-package") == "1.0"


MISBEHAVING = """
from quartet_reward.verifiers.base import Parameters, Verdict

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def fail(error):
    raise error

class Expression(Parameters):
    value: str
    later: bool = False

class Polite:
    name, description, parameters = "polite", "It answers what it is asked for.", Expression

    def verify(self, item, parameters, tools):
        if not parameters.later:
            return eval(parameters.value)

        async def later():
            return eval(parameters.value)

        return later
"""


async def test_a_packages_verifier_is_served_with_its_parameters_beside_others(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, POLITE)
    one = item(
        tagged("8", thought="please let me think"),
        verifiers=[spec("polite", weight=0.5, reward=3.0), spec("think_answer_tags", correct_reward=1.0)],
    )
    other = item(tagged("8"), item_id="b", verifiers=[spec("polite")])
    async with serving() as service:
        response = await service.stub.Score(reward_pb2.ScoreRequest(items=[one, other]), timeout=60)
        listed = await service.stub.ListVerifiers(reward_pb2.ListVerifiersRequest(), timeout=60)
    kind, rude = (result.score for result in response.results)
    assert kind.reward == 2.5 and kind.ans_acc == 1.0 and not kind.unjudged and "please" in kind.verifiers[0].reason
    assert rude.reward == 0.0 and rude.outcome == reward_pb2.OUTCOME_INCORRECT
    assert not rude.unjudged and rude.ans_acc == 0.0, "where no verifier gives an accuracy, the outcome says it"
    assert "polite" in [info.name for info in listed.verifiers]


async def test_one_that_raises_is_a_failure_with_its_place_and_never_a_number(tmp_path, monkeypatch, caplog):
    source = POLITE.replace('if "please" in', 'raise RuntimeError("no idea")\n        if "please" in')
    install(tmp_path, monkeypatch, source)
    one, scores = item("please", verifiers=[spec("polite")]), scorer()
    result = begun(one, scores)
    assert result.failure.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED and result.failure.retryable
    line = source.splitlines().index('        raise RuntimeError("no idea")') + 1
    place = f"{tmp_path / 'my_package.py'}:{line}"
    assert result.failure.message == f"verifier 'polite' raised RuntimeError: no idea ({place})"
    assert result.failure.place == place and result.failure.traceback.endswith("RuntimeError: no idea\n")
    begun(one, scores)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]  # its traceback once
    assert record.getMessage() == result.failure.message and record.place == place and record.exc_info


async def test_whatever_one_does_is_the_failure_of_its_item_alone(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, MISBEHAVING)
    cases = [
        ('Verdict(float("nan"), 1, "")', "its reward is nan, which is no finite number"),
        ("Verdict('1', 1, '')", "TypeError"),
        ("Verdict(1e300, 1, '')", "the weighted sum of the rewards is 1e+300"),
        ("Verdict(1.0, 99, '')", "no name defined for value 99"),
        ("exit(3)", "SystemExit: 3"),
        ("fail(Unprintable())", "Unprintable: its text cannot be made (RuntimeError)"),
        ("fail(KeyError('\\ud800' * 10**6))", "KeyError: '\\ud800"),
    ]
    items = [
        item(tagged("8"), item_id=f"{value} {later}", verifiers=[spec("polite", value=value, later=later)])
        for value, _ in cases
        for later in (False, True)
    ]
    items.insert(7, item(tagged("8"), item_id="neighbor"))
    async with serving() as service:
        response = await service.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=60)
    found = {result.item_id: result for result in response.results}
    assert found["neighbor"].score.reward == 10.0
    for value, message in cases:
        for later in (False, True):
            failed = found[f"{value} {later}"].failure
            assert failed.kind == reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, (value, failed)
            assert message in failed.message and len(failed.message) <= 1000, (value, failed)
