"""What the reward service gets of a completion of a prompt, and the prompt's own answer as completions."""

from collections.abc import Iterable, Sequence

from quartet.v1 import reward_pb2

from quartet_client.errors import InputError
from quartet_client.models import Score
from quartet_client.prompts import Prompt
from quartet_common.chats import as_json, continued_text
from quartet_common.run_spec import verifier_spec
from quartet_common.sections import VerifierSection
from quartet_common.text import encodable

_THOUGHT = "<think>\n</think>\n"


def own_answers(prompt: Prompt) -> list[str]:
    """Return the reference answer as a completion may write it: alone, in tags after a thought, in a box, in both.

    Raises:
        InputError: the prompt has no reference answer.
    """
    if not (whole := prompt.gt_answer.strip()):
        columns = ", ".join(prompt.columns) or "none"
        raise InputError(
            f"prompt '{prompt.id}' has no gt_answer to score as its completion; give completions: a text in which "
            f"{{NAME}} is a column (it has: {columns}), or one for each row"
        )
    answer = whole.rpartition("####")[2].strip()  # of a worked solution
    boxed = f"\\boxed{{{answer}}}"
    return [whole, f"{_THOUGHT}<answer>{answer}</answer>", boxed, f"{_THOUGHT}<answer>{boxed}</answer>"]


def best(scores: Iterable[Score]) -> tuple[int, Score]:
    """Return the score of the highest reward with its place; one without a reward only if none has one."""
    return max(enumerate(scores), key=lambda each: float("-inf") if each[1].reward is None else each[1].reward)


def score_items(
    completions: Sequence[str], prompt: Prompt, verifiers: Sequence[VerifierSection]
) -> list[reward_pb2.ScoreItem]:
    """Return items with all that the prompt has. A chat's `prompt` is the text of its messages: nothing is rendered.

    Raises:
        InputError: a completion is no text.
    """
    for index, completion in enumerate(completions):
        if not isinstance(completion, str):
            raise InputError(f"completions[{index}]: got {encodable(repr(completion), 80)}; allowed: a text")
    sent = prompt.to_proto()
    continued = continued_text(sent.chat)
    texts = [turn.content for turn in sent.chat.messages[: -1 if continued else None]]
    return [
        reward_pb2.ScoreItem(
            item_id=str(index),
            completion=encodable(continued + completion),
            reference=sent.reference,
            verifiers=map(verifier_spec, verifiers),
            prompt=sent.text or "\n".join(texts),
            columns=sent.columns,
            messages=as_json(sent.chat) if sent.HasField("chat") else "",
        )
        for index, completion in enumerate(completions)
    ]
