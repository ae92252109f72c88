"""`quartet eval MODEL SET…`: sets answered by one model, each completion in a file from which a later call goes on."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection, DataSource, load_prompts
from quartet_client.errors import InputError
from quartet_client.models import group_fields
from quartet_client.packs import packs
from quartet_client.prompts import Message, Prompt
from quartet_common.config import LoadedConfig, SamplingSection
from quartet_common.ledger import append_whole
from quartet_common.proportions import estimates
from quartet_common.sections import VerifierSection, by_name
from quartet_common.text import visible

_AT_ONCE = 1024  # prompts; their results are read before the next are submitted
_FILES = (".jsonl", ".parquet")

Record = dict[str, Any]
"""An answered problem, a line of OUT/SET.jsonl: "place" in its set, "model", "row" (its prompt) and `group_fields`."""


def read_sets(
    words: Sequence[str],
    config: LoadedConfig[DataSection],
    sampling: Mapping[str, Any],
    verifiers: Sequence[str],
    limit: int | None,
) -> dict[str, list[Prompt]]:
    """Return the problems of each set, with all that they are asked and verified with.

    Args:
        words: each a file, a function of one, a pack, PACK=FILE, or a set of the run file.
        sampling, verifiers: the command line's, instead of the sets' own.
        limit: problems of each set.

    Raises:
        InputError: a set is unknown or named twice, a source cannot be read, or its sampling makes no sense.
    """
    chosen = [VerifierSection.model_validate(by_name(one)) for one in verifiers]
    found: dict[str, list[Prompt]] = {}
    for word in words:
        name, source = _source(word, config.section.evaluation)
        if name in found:
            raise InputError(f"SET: two sets are named '{name}'; give each once, or rename a file")
        prompts = load_prompts(source, not chosen, f"SET {name}")[:limit]
        found[name] = [
            _complete(prompt, f"{name}/{place}", config, sampling, chosen) for place, prompt in enumerate(prompts)
        ]
    return found


def _source(word: str, known: Mapping[str, DataSource]) -> tuple[str, DataSource]:
    name, _, path = word.partition("=")
    if word in known:
        return word, known[word]
    if name in packs():
        return name, DataSource.model_validate({"pack": name, **({"path": path} if path else {})})
    if Path(word).suffix in _FILES or ".py:" in word:
        own = word.rpartition(":")[2] if ":" in word else Path(word).stem
        return re.sub(r"[^\w.-]+", "-", own), DataSource(path=Path(word))
    sets = f"; a set of the run file: {', '.join(known)}" if known else ""
    raise InputError(
        f"SET: got '{word}'; allowed: a pack, or PACK=FILE with its rows: {', '.join(packs())}; a file "
        f"({', '.join(_FILES)}) or FILE.py:FUNCTION{sets}"
    )


def _complete(
    prompt: Prompt,
    name: str,
    config: LoadedConfig[DataSection],
    given: Mapping[str, Any],
    chosen: list[VerifierSection],
) -> Prompt:
    """Return a prompt with its sampling, seed, verifiers and system prompt, so that its row says all that was asked."""
    run, default = config.run, SamplingSection()
    sampling: Record = {"n": 1, "temperature": default.temperature, "max_new_tokens": default.max_new_tokens}
    if config.path is None:
        sampling["temperature"] = 0.0
    for section in (run.sampling, run.evaluation_sampling, prompt.sampling):
        sampling |= section.model_dump(exclude_unset=True, exclude_none=True) if section else {}
    sampling |= given
    if sampling["n"] > 1 and not sampling["temperature"]:
        raise InputError(f"{name}: got {sampling['n']} completions at temperature 0, which are equal; set one of both")
    if sampling["temperature"]:  # the same noise in each evaluation, another for each problem
        digest = sha256(f"{sampling.get('seed', 0)}/{name}".encode()).digest()
        sampling["seed"] = int.from_bytes(digest[:8]) >> 2
    by_reference = [VerifierSection(name="code" if prompt.test_cases or prompt.test_program else "math")]
    verifiers = chosen or prompt.verifiers or (by_reference if config.path is None else run.verifiers)
    changed: Record = {"sampling": SamplingSection(**sampling), "verifiers": verifiers}
    if prompt.messages and run.system_prompt and prompt.messages[0].role != "system":
        changed["messages"] = [Message(role="system", content=run.system_prompt), *prompt.messages]
    return prompt.model_copy(update=changed)


class SetResult:
    """The answers to a set so far.

    Attributes:
        rows: its problems, as JSON values.
        records: of answered problems, by place.
        failures: why others have no answer or no score, by place.
    """

    def __init__(self, name: str, prompts: Sequence[Prompt], model: Record, out: Path):
        """Read the answers of an earlier call in `out`; raises InputError if they are another model's, or of others."""
        self.path = out / f"{name}.jsonl"
        self.rows = [json.loads(prompt.model_dump_json(exclude_unset=True, exclude_none=True)) for prompt in prompts]
        self.failures: dict[int, list[str]] = {}
        self.records: dict[int, Record] = {}
        for record in self._stored():
            if (place := record["place"]) < len(self.rows):
                self.records[place] = record
                before, now = ({"model": each["model"], **each["row"]} for each in (record, self._record(place, model)))
                for key in before | now:
                    if before.get(key) != now.get(key):
                        old, new = (json.dumps(each.get(key), ensure_ascii=False)[:200] for each in (before, now))
                        raise InputError(
                            f"'{self.path}' has answers with another {key}: {old}; it is {new} now; give another "
                            "--out, or delete the file"
                        )

    def _record(self, place: int, model: Record) -> Record:
        return {"place": place, "model": model, "row": self.rows[place]}

    def _stored(self) -> Iterator[Record]:
        """Yield the records of the file, and cut off a last line that is incomplete because its writer was killed."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("rb+") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                record = json.loads(line)
                yield record | {key: record[key] for key in ("place", "model", "row", "completions")}
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{self.path}, line {number}: it is no answer of `quartet eval`; give another --out"
                ) from None

    async def answer(
        self,
        client: AsyncClient,
        run_id: str,
        prompts: Sequence[Prompt],
        model: Record,
        say: Callable[[str], None],
        timeout: float,
    ) -> None:
        """Have a run's rollouts answer what is not answered yet, and append each problem to the file.

        Args:
            timeout: seconds without a result after which QuartetError is raised.
        """
        name, count = self.path.stem, len(prompts)
        todo = [place for place in range(count) if place not in self.records]
        if self.records:
            say(f"{name}: {len(self.records)} of {count} problems are in {self.path}")
        for begin in range(0, len(todo), _AT_ONCE):
            places = todo[begin : begin + _AT_ONCE]
            handles = await client.submit(run_id, [prompts[place] for place in places], timeout=timeout)
            of = {handle.instance_id: place for handle, place in zip(handles, places, strict=True)}
            async for group in client.results(handles, timeout):
                place = of[group.instance_id]
                if group.dead:
                    self.failures[place] = list(dict.fromkeys(group.dead.reasons))
                else:
                    self.records[place] = self._record(place, model) | group_fields(group)
                    with self.path.open("ab", buffering=0) as file:
                        line = visible(json.dumps(self.records[place], ensure_ascii=False)) + "\n"
                        append_whole(file, line.encode(), file.tell())
                done = len(self.records) + len(self.failures)
                if done * 10 // count > (done - 1) * 10 // count:
                    say(f"{name}: {done} of {count} problems, {len(self.failures)} failed")

    def summary(self) -> Record:
        """Return counts, means over completions, and `estimates` with their intervals; programs do not vote."""
        answers, completions = [], [one for record in self.records.values() for one in record["completions"]]
        for record in self.records.values():
            votes = not (record["row"].get("test_cases") or record["row"].get("test_program"))
            judged = [one for one in record["completions"] if one["ans_acc"] is not None]
            answers.append([(one["ans_acc"], one["parsed_answer"] if votes else "") for one in judged])
        quoted = {
            name: {"value": one.value, "low": one.low, "high": one.high} for name, one in estimates(answers).items()
        }
        return {
            "problems": len(self.rows),
            "failed": len(self.rows) - len(self.records),
            "completions": len(completions),
            "metrics": quoted,
            "reward": _mean([one["reward"] for one in completions]),
            "response_length": _mean([one["tokens"] for one in completions]),
            "truncated_ratio": _mean([one["finish_reason"] == "length" for one in completions]),
            "policy_versions": sorted({span[0] for one in completions for span in one["version_spans"]}),
            "sampling": {key: value for key, value in self.rows[0]["sampling"].items() if key != "seed"},
            "verifiers": sorted({each["name"] for one in completions for each in one["verifiers"]}),
            "failures": {self.rows[place]["id"]: reasons for place, reasons in self.failures.items()},
        }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
