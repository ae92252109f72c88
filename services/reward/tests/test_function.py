"""Reward functions from a file: what they are given, what they may return, and what becomes of those that do not."""

import json

import pytest
from quartet.v1 import reward_pb2
from reward_samples import serving

from quartet_common.config import ConfigError, load_config
from quartet_reward.config import RewardSection
from quartet_reward.preflight import preflight

FILE = """
import asyncio, os, time
from quartet_reward import Score

def close(completion, answer, tolerance=0.0, **columns):
    "Near the answer."
    return abs(float(completion) - float(answer)) <= tolerance

def scored(completion, level, scale=1):
    return Score(scale * level["n"], correct=False, answer=completion, reason="because")

def echo(completion, **columns):
    return Score(0, reason=repr((completion, sorted(columns.items()))))

async def later(completion):
    await asyncio.sleep(0)
    return len(completion)

def array(completion):
    import numpy
    return numpy.float64(len(completion)) / 2

def imports(completion):
    from sklearn.metrics import f1_score

def none(completion): return None
def raises(completion): raise KeyError("a")
def dies(completion): os._exit(3)
def slow(completion): time.sleep(600)

def trl(completions, prompts, answer, **columns):
    assert sorted(columns) == ["gt_answer", "level"], columns
    return [float(text == right and level > 1) for text, right, level in zip(completions, answer, columns["level"])]

def chats(prompts, completions, **columns):
    return [float(chat[-1]["content"] == answer[0]["content"]) for chat, answer in zip(prompts, completions)]

def two(completions): return [1.0, 2.0]

class Words:
    def __call__(self, completion): return "words"

words = Words()
"""
CRASHED, INVALID = reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, reward_pb2.FAILURE_KIND_INVALID_ITEM


ADD = "if it is a package, install it: quartet env add reward scikit-learn"


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(FILE.splitlines(), 1) if text in line)


# The function; what the item has; reward, accuracy and reason of its score, or kind and message of its failure.
CASES = [
    ("close", {"completion": "2.5<|im_end|>", "columns": {"tolerance": 0.5}}, (1.0, 1.0, "")),
    ("close", {"completion": "2.5", "parameters": {"tolerance": 1}}, (1.0, 1.0, "")),
    ("scored", {"columns": {"level": {"n": 3}}, "parameters": {"scale": 2}}, (6.0, 0.0, "because")),
    ("echo", {"columns": {"id": 2**60, "of": ["é"]}}, (0.0, 0.0, f"('2', [('id', {2**60}), ('of', ['é'])])")),
    ("later", {"completion": "four"}, (4.0, 0.0, "")),
    ("array", {"completion": "four"}, (2.0, 0.0, "")),
    (
        "imports",
        {},
        (CRASHED, f"verifier '{{0}}:imports' raised ModuleNotFoundError: No module named 'sklearn'; {ADD}"),
    ),
    ("none", {}, (INVALID, "no verifier has a verdict")),
    ("raises", {}, (CRASHED, f"verifier '{{0}}:raises' raised KeyError: 'a' ({{0}}:{line_of('KeyError')})")),
    ("dies", {}, (CRASHED, "verifier '{0}:dies' ended its process: it exited with status 3")),
    ("slow", {}, (CRASHED, "verifier '{0}:slow' took too long: killed after 3.0 s (reward.function_seconds)")),
    ("trl", {"columns": {"level": 2}}, (1.0, 0.0, "")),
    ("chats", {"messages": [{"role": "user", "content": "2"}]}, (1.0, 0.0, "")),
    ("two", {}, (CRASHED, "verifier '{0}:two' returned 2 numbers for 1 completion")),
    ("words", {}, (CRASHED, "verifier '{0}:words' returned 'words' (str)")),
]


JUDGING = ("close", "scored")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "reward.py"
    path.write_text(FILE)
    return path


def item_of(file, number, function, completion="2", columns=None, messages=None, parameters=None, also=()):
    spec = reward_pb2.VerifierSpec(name=f"{file}:{function}")
    spec.parameters.update(parameters or {})
    return reward_pb2.ScoreItem(
        item_id=str(number),
        completion=completion,
        reference=reward_pb2.Reference(answer="2"),
        verifiers=[spec, *also],
        columns=columns if isinstance(columns, str) else json.dumps(columns) if columns else "",
        messages=json.dumps(messages) if messages else "",
    )


async def test_every_value_that_a_function_returns_is_a_score_or_a_failure_of_its_item_alone(file):
    items = [item_of(file, number, function, **given) for number, (function, given, _) in enumerate(CASES)]
    exact = [reward_pb2.VerifierSpec(name="exact", weight=3)]
    items.append(item_of(file, len(CASES), "none", also=exact))
    named = json.dumps(sorted({f"{file}:{function}" for function, _, _ in CASES}))
    async with serving(f"reward.functions={named}", "reward.function_seconds=3") as service:
        results = (await service.stub.Score(reward_pb2.ScoreRequest(items=items))).results
    for result, (function, given, expected) in zip(results[:-1], CASES, strict=True):
        if result.HasField("score"):
            assert (result.score.reward, result.score.ans_acc, result.score.reason) == expected, (function, given)
            assert result.score.unjudged is (function not in JUDGING), function
        else:
            kind, message = expected
            assert result.failure.kind == kind, result.failure
            assert result.failure.message.startswith(message.replace("{0}", str(file))), result.failure.message
    assert results[-1].score.reward == 30.0, "what a function has no verdict on the others have"
    abstained, exact = results[-1].score.verifiers
    assert (abstained.outcome, abstained.HasField("ans_acc")) == (reward_pb2.OUTCOME_UNSPECIFIED, False)
    assert (exact.weight, exact.ans_acc, list(exact.reads)) == (3, 1, ["gt_answer"])
    found = ((case[0], result.score.verifiers) for case, result in zip(CASES, results, strict=False))
    reads = {function: list(verifiers[0].reads) for function, verifiers in found if verifiers}
    assert (reads["close"], reads["scored"]) == (["answer", "tolerance", "*"], ["level", "scale"])
    assert (reads["later"], reads["trl"]) == ([], ["answer", "answer", "*"])


@pytest.mark.parametrize(
    ("content", "choice", "why"),
    [
        (None, 'file="PATH:close"', "run.verifiers[0].file: there is no file 'PATH'"),
        ("import sklearn", 'file="PATH:close"', f"No module named 'sklearn'; {ADD} (PATH:1)"),
        (
            "try:\n import cv\nexcept ImportError as e:\n raise OSError('no') from e",
            'file="PATH:close"',
            "reward cv (PATH",
        ),
        ("import re.no", 'file="PATH:close"', "No module named 're.no' (PATH:1)"),
        ("x = 1 +", 'file="PATH:close"', "'PATH' raised SyntaxError: invalid syntax (reward.py, line 1) (PATH:1)"),
        ("def near(completion): 0", 'file="PATH:close"', "'PATH' has no function 'close'; it has: near"),
        (FILE, 'file="PATH:scored", parameters={scal=1}', "takes no argument 'scal'; allowed: level, scale"),
        (FILE, 'file="PATH:scored", name="exact"', "got name 'exact' and file 'PATH:scored'; exactly one of them is"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(tmp_path, content, choice, why):
    file = tmp_path / "reward.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        overrides = [f"run.verifiers=[{{{choice}}}]".replace("PATH", str(file))]
        preflight(load_config("reward", RewardSection, overrides=overrides))
    assert why.replace("PATH", str(file)) in str(refused.value)
