"""Rows of Parquet files, of datasets of the hub and of functions of modules, the map of columns, and what is wrong."""

import io
import json
import os
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet

from quartet_client.data import DataSection, DataSource, RunData, load_prompts
from quartet_client.errors import InputError
from quartet_client.mixture import Part
from quartet_client.prompts import Prompt
from quartet_client.sft import write_lines
from quartet_common.config import ConfigError, load_config
from quartet_common.sft import SftSection

HUB = Path(__file__).parents[2] / "tests" / "hub"
sys.path.append(str(HUB))
from hub_server import TOKEN, HubServer  # noqa: E402

ROWS = [{"question": f"1+{number}=?", "answer": str(1 + number), "level": number} for number in range(4)]
GSM8K = {"question": "How many?", "answer": "4"}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
- config_name: hard
  data_files: hard.parquet
---
"""
FIELDS = {"messages": "question", "gt_answer": "answer"}


def parquet(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    pyarrow.parquet.write_table(pyarrow.table({key: [row.get(key) for row in rows] for key in columns}), buffer)
    return buffer.getvalue()


def test_a_parquet_file_gives_what_the_same_lines_give(tmp_path, write):
    rows = [
        {"prompt": "a", "gt_answer": "1", "level": 1, "made": None},
        {"prompt": "b", "test_cases": {"inputs": ["1"], "outputs": ["2"]}, "level": 2, "made": date(2026, 1, 2)},
    ]
    (tmp_path / "train.parquet").write_bytes(parquet(rows))
    lines = [{**rows[0], "id": "row-1"}, {**rows[1], "id": "row-2", "made": "2026-01-02"}]
    path = write("train.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
    assert load_prompts(tmp_path / "train.parquet", require_reference=True) == load_prompts(path)


def test_supervised_rows_of_a_parquet_file_become_lines(tmp_path):
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": None}]] * 2
    (tmp_path / "train.parquet").write_bytes(parquet([{"chat": chat, "level": 1} for chat in chats]))
    (tmp_path / "held.jsonl").write_text('{"text": "a"}')
    source = {"path": tmp_path / "train.parquet", "fields": {"messages": "chat"}}
    section = SftSection(data=source, evaluation={"held": tmp_path / "held.jsonl"})
    settings, titles = write_lines(section, tmp_path / "rows")
    file = tmp_path / "rows" / "0.jsonl"
    assert settings == [f'sft.data="{file}"'] and titles[f"{file}, line "] == f"{tmp_path / 'train.parquet'}, row "
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"messages": [chats[0][0], {"role": "assistant", "content": "b"}]}] * 2
    section = SftSection(data={**source, "fields": {"messages": "chats"}})
    with pytest.raises(InputError, match=r"sft.data.fields.messages: .*, row 1 has no column 'chats'; did you mean"):
        write_lines(section, tmp_path / "rows")


@pytest.mark.parametrize("fields", [{}, {"prompt": "prompt", "id": "key", "metadata": "notes"}])
def test_nulls_are_not_given_and_values_without_json_become_text_at_any_depth(tmp_path, fields):
    key = UUID(int=7)
    row = {
        "prompt": "a",
        "gt_answer": None,
        "sampling": None,
        "key": key if fields else 12,
        "notes": '{"level": 1}',
        "made": {"on": date(2026, 1, 2), "by": None, "costs": [Decimal("1.50"), None]},
        "picture": {"bytes": b"\xff\x00", "text": "né".encode()},
    }
    (tmp_path / "own.py").write_text(
        "from datetime import date\nfrom decimal import Decimal\nfrom uuid import UUID\n"
        f"def train():\n    import datetime\n    yield {row!r}\n"
    )
    (prompt,) = load_prompts(DataSource(path=f"{tmp_path}/own.py:train", fields=fields))
    assert prompt.columns["made"] == {"on": "2026-01-02", "costs": ["1.50", None]}
    assert prompt.columns["picture"] == {"bytes": "/wA=", "text": "né"}
    assert "gt_answer" not in prompt.columns and prompt.sampling is None
    if fields:
        assert prompt.id == str(key) and prompt.metadata == {"level": "1"}


def test_a_map_takes_columns_as_fields_and_leaves_the_others_to_reward_functions(tmp_path, write):
    table, lines = tmp_path / "train.parquet", write("train.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    table.write_bytes(parquet(ROWS))
    for path in (table, lines):
        first, *_, last = load_prompts(DataSource(path=path, fields=FIELDS), require_reference=True)
        assert [(turn.role, turn.content) for turn in first.messages] == [("user", "1+0=?")]
        assert (last.gt_answer, last.columns) == ("4", {"level": 3})
    taken = [{"prompt": "not this", "text": "a", "id": 7}]
    table.write_bytes(parquet(taken))
    (prompt,) = load_prompts(DataSource(path=table, fields={"prompt": "text"}))
    assert (prompt.prompt, prompt.id, prompt.columns) == ("a", "row-1", {"prompt": "not this", "id": 7})
    with pytest.raises(InputError, match="row 1: \"columns\": got 'not this'; input should be a valid dictionary"):
        load_prompts(DataSource(path=table, fields={"prompt": "text", "columns": "prompt"}))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"path": "cut.parquet"}, "data.train: cannot read 'cut.parquet': it is not a complete Parquet file: "),
        (
            {"path": "train.parquet", "fields": {"prompt": "questoin"}},
            "data.train.fields.prompt: train.parquet, row 1 has no column 'questoin'; did you mean 'question'?",
        ),
        (
            {"path": "train.parquet", "fields": {"promt": "question"}},
            "data.train.fields: in run.toml: a prompt has no field 'promt'; did you mean 'prompt'?",
        ),
        (
            {"path": "train.jsonl", "dataset": "own/set"},
            "data.train: in run.toml: exactly one of path, dataset and environment",
        ),
        ({"path": "train.parquet", "split": "test"}, "data.train: in run.toml: split belongs to a dataset of the hub"),
    ],
)
def test_what_is_wrong_with_a_source_is_one_sentence(tmp_path, write, monkeypatch, source, sentence):
    monkeypatch.chdir(tmp_path)
    content = parquet(ROWS)
    Path("train.parquet").write_bytes(content)
    Path("cut.parquet").write_bytes(content[: len(content) // 2])
    write("run.toml", "")
    config = load_config("none", DataSection.__base__, Path("run.toml"))
    config.data["train"] = source
    with pytest.raises((InputError, ConfigError)) as error:
        RunData.load(config)
    assert str(error.value).startswith(sentence), str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def hub():
    with HubServer() as server:
        files = {"README.md": CARD, "main/train.parquet": parquet(ROWS), "main/test.parquet": parquet([GSM8K] * 2)}
        files["hard.parquet"] = parquet([{"question": "Hard?", "answer": "9"}])
        server.add("datasets", "own/set", {**files, "main/train.parquet": parquet(ROWS[:1])}, ref="old")
        server.add("datasets", "own/set", files)
        server.add("datasets", "own/private", files, private=True)
        server.add("datasets", "own/gated", files, gated=True)
        yield server


@pytest.fixture
def load(hub, tmp_path):
    """Load [data] once of each settings, in a process, as huggingface_hub reads its variables at imports.

    Returns what is said of each: its training prompts, then how many each set has, and their order; or what is wrong.
    """

    def run(*settings: tuple[str, ...], **variables: str) -> list[str]:
        program = (
            "import json, os, sys\nfrom quartet_client.data import DataSection, RunData\n"
            "from quartet_client.errors import InputError\nfrom quartet_common.config import load_config\n"
            "for settings in json.loads(sys.argv[1]):\n"
            "    try:\n        data = RunData.load(load_config('data', DataSection, None, settings))\n"
            "        said = ', '.join(f'{p.id} {p.messages[0].content} {p.gt_answer}' for p in data.train)\n"
            "        said += f'\\n{ {n: len(p) for n, p in data.evaluation.items()} } {data.order(data.parts[0], 0)}'\n"
            "    except InputError as error:\n        said = str(error)\n"
            "    print(json.dumps(said), flush=True)\n"
            "os._exit(0)"  # as the command ends: Arrow's threads may still hold the files
        )
        environment = {**os.environ, **hub.environment(tmp_path / "home"), **variables}
        command = [sys.executable, "-c", program, json.dumps(settings)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def of(dataset: str, key: str = "data.train", **more: str) -> str:
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in {"dataset": dataset, **more}.items())
    return f"{key}={{{table}, fields = {{messages = 'question', gt_answer = 'answer'}}}}"


def test_a_dataset_of_the_hub_trains_and_evaluates_and_is_read_from_the_cache_when_offline(load, hub):
    settings = (of("own/set", name="main"), of("own/set", "data.evaluation.test", name="main", split="test"))
    order = RunData(DataSection(), [], {}).order(Part([Prompt(prompt="as many lines")] * 4), 0)
    expected = f"row-1 1+0=? 1, row-2 1+1=? 2, row-3 1+2=? 3, row-4 1+3=? 4\n{{'test': 2}} {order}"
    assert load(settings) == [expected]
    asked = len(hub.requests)
    assert load(settings, HF_HUB_OFFLINE="1") == [expected], "the same rows in the same order"
    assert len(hub.requests) == asked
    old = of("own/set", name="main", split="train[:2]", revision="old")
    others = load([old], [of("own/set", name="hard")], [of("own/private", name="main")], HF_TOKEN=TOKEN)
    starts = ["row-1 1+0=? 1\n", "row-1 Hard? 9\n", "row-1 1+0=? 1, "]
    assert all(map(str.startswith, others, starts)), others


def test_what_is_wrong_with_a_dataset_is_one_sentence(load, hub, tmp_path):
    expected = {
        of("own/private"): f"data.train.dataset: no dataset 'own/private' at {hub.address}; allowed: a",
        of("own/gated"): "data.train.dataset: 'own/gated' is gated, and HF_TOKEN has no access to it; accept",
        of("own/set", name="main", revision="v9"): "data.train.revision: 'own/set' has no 'v9' at",
        of("own/set", name="main", split="trian"): 'data.train.split: own/set: unknown split "trian". Should be one of',
    }
    for said, sentence in zip(load(*([setting] for setting in expected)), expected.values(), strict=True):
        assert said.startswith(sentence) and "\n" not in said, said
    (refused,) = load([of("own/set", name="main")], HF_TOKEN="hf_wrong")
    assert "refuses HF_TOKEN for 'own/set' (HTTP 401)" in refused
    (offline,) = load([of("own/set", name="main")], HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert "data.train.dataset: 'own/set' is not in the cache" in offline and "HF_HUB_OFFLINE forbids" in offline


@pytest.mark.parametrize("loaded", ["json", "pyarrow"])
def test_a_command_that_loaded_arrow_ends_without_the_interpreters_finalization(loaded):
    program = (
        f"import atexit\nimport {loaded}\nfrom quartet_client import __main__ as command\n"
        "class Kept:\n    def __del__(self):\n        print('finalization')\nkept = Kept()\n"
        "command.main = lambda: atexit.register(print, 'exit function') and 3\ncommand.start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    expected = ["exit function"] + ["finalization"] * (loaded != "pyarrow")
    assert (done.returncode, done.stdout.splitlines()) == (3, expected), done.stderr


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("rows.json", '[\n {"prompt": "1", "gt_answer": "2"}\n]', "a JSON array"),
        ("rows.csv", "prompt,gt_answer\n1,2\n", "a table of comma-separated values"),
        ("rows.csv", "\ufeffprompt;gt_answer\n1;2\n", "a table of values with semicolons"),
        ("rows.csv", "\ufeffprompt,gt_answer\n1,2\n", "a table of comma-separated values"),
        ("rows.tsv", "prompt\tgt_answer\n1\t2\n", "a table of tab-separated values"),
    ],
)
def test_a_file_of_another_form_is_refused_with_a_command_that_converts_it(name, text, form, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        load_prompts(tmp_path / name)
    said = str(refused.value)
    assert f"data.train: '{tmp_path / name}' is {form}; allowed: JSONL" in said
    subprocess.run(said.partition("convert it: ")[2], shell=True, check=True)
    (prompt,) = load_prompts(tmp_path / "rows-rows.jsonl")
    assert (prompt.prompt, prompt.gt_answer) == ("1", "2")


def test_a_packed_file_an_id_of_the_hub_and_a_mark_at_the_beginning(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="is compressed; allowed: JSONL or Parquet; unpack it"):
        load_prompts(tmp_path / "rows.jsonl.gz")
    with pytest.raises(InputError, match='a dataset of the hub: { dataset = "openai/gsm8k" }'):
        load_prompts(Path("openai/gsm8k"))
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\n')
    assert load_prompts(tmp_path / "rows.jsonl")[0].prompt == "1"
