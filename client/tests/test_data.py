"""Prompts in JSONL: what is accepted, and the sentence for each way of being wrong."""

import json
from itertools import islice
from pathlib import Path

import pytest

from quartet_client.data import DataSection, RunData, load_prompts, parse_rows
from quartet_client.errors import InputError
from quartet_client.mixture import Part
from quartet_client.prompts import Prompt
from quartet_client.rows import parse_lines
from quartet_common.config import ConfigError, load_config


def parsed(lines: list[str], require_reference: bool = False) -> list[Prompt]:
    return parse_rows(parse_lines(lines, "x"), "x", require_reference)


def test_colossalchat_lines_load_as_they_are():
    lines = [
        '{"messages": {"role": "user", "content": "2+3?"}, "gt_answer": "5"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "gt_answer": 6}',
        '{"messages": {"role": "user", "content": "sum"}, "test_cases": {"inputs": ["1 2"], "outputs": ["3"]}}',
    ]
    one, many, code = (prompt.to_proto() for prompt in parsed(lines, require_reference=True))
    assert [(turn.role, turn.content) for turn in one.chat.messages] == [("user", "2+3?")]
    assert one.reference.answer == "5" and one.prompt_id == "line-1"
    assert len(many.chat.messages) == 2 and many.reference.answer == "6"
    assert [(case.input, case.output) for case in code.reference.test_cases] == [("1 2", "3")]


def test_rows_with_quartet_fields_are_read():
    line = (
        '{"prompt": "2+3=?", "gt_answer": "5", "id": "p", "verifiers": ["boxed", {"name": "exact", "weight": 2}], '
        '"sampling": {"n": 4, "temperature": 0}, "metadata": {"level": 3}, '
        '"environment": {"name": "game", "max_turns": 3, "parameters": {"level": 7}}}'
    )
    function = '{"token_ids": [1, 258], "test_cases": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}}'
    proto, code = (prompt.to_proto() for prompt in parsed([line, function]))
    assert proto.text == "2+3=?" and proto.prompt_id == "p" and proto.metadata == {"level": "3"}
    assert [(verifier.name, verifier.weight) for verifier in proto.verifiers] == [("boxed", 1.0), ("exact", 2.0)]
    assert proto.sampling.n == 4 and proto.sampling.temperature == 0
    assert not proto.sampling.HasField("top_p") and proto.sampling.max_new_tokens == 0  # unset: the run's
    assert proto.environment.max_turns == 3 and dict(proto.environment.parameters) == {"level": 7}
    assert not code.HasField("environment")
    (case,) = code.reference.test_cases
    assert (case.input, case.output, code.reference.entry_point) == ("[1, 2]", "3", "add")
    assert code.token_ids.data == b"\x01\0\0\0\x02\x01\0\0" and list(code.token_ids.shape) == [2]


GOOD = '{"prompt": "a", "gt_answer": "1"}\n'


def test_a_chat_carries_tools_calls_and_variables_of_its_template():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    prompt = Prompt.parse(
        {
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Add."}],
                },
                {"role": "user", "content": "1+1?", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1", "name": None},
            ],
            "tools": json.dumps(tools),
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    chat = prompt.to_proto().chat
    assert [turn.content for turn in chat.messages] == ["Be brief.\nAdd.", "1+1?", "", "2"]
    (called,) = json.loads(chat.messages[2].template_fields)["tool_calls"]
    assert called["function"]["arguments"] == {"a": 1}, "templates expect an object"
    assert json.loads(chat.messages[3].template_fields) == {"tool_call_id": "c1"}
    assert json.loads(chat.tools) == tools and json.loads(chat.template_arguments) == {"enable_thinking": False}
    assert not prompt.columns


def test_a_task_is_an_object_and_beside_another_input_a_column():
    task = Prompt.parse({"task": {"level": 3}, "id": "a"})
    assert json.loads(task.to_proto().task) == {"level": 3} and task.has_reference and not task.columns
    for row in ({"task": {"level": 3}, "prompt": "1+1=?"}, {"task": "sums", "prompt": "1+1=?"}):
        prompt = Prompt.parse(row)
        assert prompt.task is None and prompt.columns == {"task": row["task"]}
        assert prompt.to_proto().WhichOneof("input") == "text"


ONE_OF = 'exactly one of "messages", "prompt", "token_ids" and "task" is allowed'
FINITE = "allowed: a finite number"


def fields(more: str) -> str:
    return f'{{"prompt": "a", "gt_answer": "1", {more}}}'


def verifier(more: str) -> str:
    return fields(f'"verifiers": [{{"name": "x", {more}}}]')


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "a"', "not valid JSON: expecting ',' delimiter at column 15 of '{\"prompt\": \"a\"'"),
        ('{"gt_answer": "1"}', f"got none of them; {ONE_OF}"),
        ('{"prompt": "a", "gt_anwser": "1"}', 'unknown field "gt_anwser"; did you mean "gt_answer"?'),
        ('{"prompt": "a", "gt_answer": [1, 2]}', '"gt_answer": got [1, 2]; a list of 2 answers; one is allowed'),
        ('{"prompt": "a"}', 'nothing to check completions against; give "gt_answer", "test_cases" or "test_program"'),
        ('{"messages": {"role": "robot", "content": "a"}, "gt_answer": "1"}', "\"messages.0.role\": got 'robot'; "),
        ('{"messages": {"role": "user", "content": null}, "gt_answer": "1"}', '"messages.0.content" is missing'),
        (
            '{"messages": {"role": "user", "content": [{"type": "image_url"}]}, "gt_answer": "1"}',
            "got a part 'image_url'; allowed: parts of text",
        ),
        ('{"prompt": "a", "tools": [{}], "gt_answer": "1"}', 'got "tools" with "prompt"; allowed with "messages"'),
        (fields('"test_cases": {"inputs": ["1", "2"], "outputs": ["1"]}'), "2 inputs and 1 outputs; there must be as"),
        (fields('"level": 1, "columns": "a"'), "\"columns\": got 'a'; input should be a valid dictionary"),
        (fields('"sampling": {"temperature": -1}'), '"sampling.temperature": got -1; input should be greater than or'),
        (fields('"environment": {"parameters": {"a": [1, -Infinity]}}'), f"parameters.a[1]: got -inf; {FINITE}"),
        (verifier('"weight": 1e999'), f"verifiers[0].weight: got inf; {FINITE}"),
        (r'{"prompt": "a\ud800", "gt_answer": "1"}', r"prompt: got 'a\ud800'; allowed: text without lone surrogates"),
        (f'{{"gt_answer": {"9" * 5000}}}', "JSON that cannot be read: Exceeds the limit (4300 digits)"),
        ("[" * 100_000, "JSON that cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_a_broken_line_is_named_with_what_came_and_what_is_allowed(write, line, sentence):
    path = write("train.jsonl", GOOD + "\n" + line + "\n" + GOOD)
    with pytest.raises(InputError) as error:
        load_prompts(path, require_reference=True)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path, write, monkeypatch):
    with pytest.raises(InputError, match="cannot read '.*gone.jsonl': no such file"):
        load_prompts(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match="it holds no prompts"):
        load_prompts(write("empty.jsonl", "\n\n"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    monkeypatch.setattr("sys.stdin", (tmp_path / "latin.jsonl").open(encoding="utf-8"))
    for path in (tmp_path / "latin.jsonl", Path("-")):
        with pytest.raises(InputError, match="not UTF-8"):
            load_prompts(path)


ROWS = """
import json

def rows():
    for number in range(3):
        yield {"prompt": f"1+{number}=?", "gt_answer": 1 + number, "level": number}

def texts():
    return ["a", "b"]

def broken():
    yield {"prompt": "a", "gt_answer": "1"}
    yield {"prompt": "b", "gt_anwser": "1"}

def raises():
    yield {"prompt": "a", "gt_answer": "1"}
    raise KeyError("level")

def sets():
    yield {"prompt": "a", "gt_answer": "1", "metadata": {"a": {1, 2}}}

def imports():
    import a_package_that_is_not_here
"""


def test_a_function_of_a_file_gives_rows_as_lines_do(write):
    path = write("problems.py", ROWS)
    first, *_, last = prompts = load_prompts(Path(f"{path}:rows"), require_reference=True)
    assert [prompt.id for prompt in prompts] == ["row-1", "row-2", "row-3"]
    assert (first.prompt, last.gt_answer, last.columns) == ("1+0=?", "3", {"level": 2})
    assert [prompt.prompt for prompt in load_prompts(Path(f"{path}:texts"))] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", '{}:broken, row 2: unknown field "gt_anwser"; did you mean "gt_answer"?'),
        ("raises", "{}:raises: it raised KeyError: 'level' after row 1"),
        (
            "imports",
            "{}:imports: it raised ModuleNotFoundError: No module named 'a_package_that_is_not_here'; if it",
        ),
        ("sets", "{}:sets, row 1: Object of type set is not JSON serializable"),
        ("gone", "'{}' has no function 'gone'"),
    ],
)
def test_a_function_without_rows_is_named_with_the_reason(write, name, sentence):
    path = write("problems.py", ROWS)
    with pytest.raises(InputError) as error:
        load_prompts(Path(f"{path}:{name}"))
    assert str(error.value).startswith(sentence.format(path))
    with pytest.raises(InputError, match=r"there is no file '.*gone\.py'"):
        load_prompts(path.parent / "gone.py:rows")


def _data(prompts: int = 10, **section) -> RunData:
    train = [Prompt(prompt=str(index), gt_answer="1") for index in range(prompts)]
    return RunData(DataSection(**section), [Part(train)], {"held": train[:2]})


def test_passes_are_shuffled_anew_and_the_same_every_time():
    data = _data(passes=3)
    ids = [instance.instance_id for instance in data.training_instances()]
    assert ids == [instance.instance_id for instance in _data(passes=3).training_instances()]
    assert len(set(ids)) == 30
    orders = [data.order(data.parts[0], data_pass) for data_pass in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders) and len({tuple(order) for order in orders}) == 3


def test_an_instance_id_names_the_prompts_place_in_its_file_whatever_the_order():
    for seed in (1, 2):
        instances = {i.instance_id: i for i in _data(shuffle_seed=seed, passes=2).training_instances()}
        assert instances["pass-1/7"].prompt.text == "7" and instances["pass-1/7"].data_pass == 1


def test_without_shuffling_the_order_is_the_files_and_passes_zero_goes_on():
    data = _data(shuffle=False)
    assert data.order(data.parts[0], 5) == list(range(10))
    assert len(list(islice(_data(passes=0).training_instances(), 35))) == 35
    assert [instance.instance_id for instance in _data().evaluation_instances("held")] == ["held/0", "held/1"]


def test_a_set_is_named_as_the_broker_allows(write):
    with pytest.raises(ConfigError, match="data.evaluation.*'held out'; allowed: 1 to 64 of"):
        RunData.load(load_config("data", DataSection, write("run.toml", "[data.evaluation]\n'held out' = 'a.jsonl'")))


def test_chats_for_a_model_without_chat_template_are_refused_before_anything_starts(write, tmp_path):
    train = write("train.jsonl", GOOD)
    held = write("held.jsonl", GOOD + '{"messages": {"role": "user", "content": "a"}, "gt_answer": "1"}\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    write("tokenizer_config.json", '{"chat_template": null}')
    text = f"[model]\npath = '{tmp_path}'\n[data]\ntrain = '{train}'\nevaluation.heldout = '{held}'"
    config = load_config("data", DataSection, write("run.toml", text))
    with pytest.raises(InputError) as error:
        RunData.load(config)
    told = f"{held}: prompt 'line-2' has \"messages\", and the model in '{tmp_path}' has no chat template; give"
    assert str(error.value).startswith(told)
    write("chat_template.jinja", "{{ messages }}")
    RunData.load(config)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "1", "gt_answer": "1"},', "allowed: one JSON object a line, with double quotes and no comma"),
        (
            '{"prompt": "1", "response": "1"}',
            'its columns fit with fields = { prompt = "prompt", gt_answer = "response" }',
        ),
        ('{"prompt": "1", "gt_answer": "1", "gt_answer": "2"}', 'got "gt_answer" twice; allowed: each key once'),
        ('{"chosen": "1", "rejected": "2"}', "; the row has chosen, rejected: name them in `fields`"),
        ('{"messages": [{"from": "human", "value": "1"}], "gt_answer": "1"}', "is missing; there are from, value"),
    ],
)
def test_a_refused_row_says_what_it_has_and_what_fits(write, line, told):
    with pytest.raises(InputError) as refused:
        load_prompts(write("train.jsonl", line + "\n"), True)
    assert told in str(refused.value)


def test_a_bad_setting_of_a_row_proposes_no_other_columns(write):
    with pytest.raises(InputError) as refused:
        load_prompts(write("train.jsonl", '{"prompt": "1", "gt_answer": "1", "sampling": {"top_p": 0}}\n'), True)
    assert str(refused.value).endswith("input should be greater than 0")


@pytest.mark.parametrize("value", ["true", '{"a": 1}', '["1", "2"]'])
def test_a_bad_value_of_a_named_field_proposes_no_names(write, value):
    with pytest.raises(InputError) as refused:
        load_prompts(write("train.jsonl", f'{{"prompt": "1", "gt_answer": {value}}}\n'), True)
    assert '"gt_answer": got' in str(refused.value) and "`fields`" not in str(refused.value)


@pytest.mark.parametrize("column", ["image", "images", "videos"])
def test_a_column_of_images_is_refused_unless_it_is_for_rewards(write, column):
    rest = '"prompt": "1", "gt_answer": "1"'
    load_prompts(write("train.jsonl", f'{{{rest}, "{column}": null, "columns": {{"{column}": ["a.png"]}}}}\n'), True)
    with pytest.raises(InputError) as refused:
        load_prompts(write("train.jsonl", f'{{{rest}, "{column}": ["a.png"]}}\n'), True)
    told = f'line 1: got "{column}", which the model would not see; allowed: text; leave the column out by a function,'
    assert told in str(refused.value)


def test_a_misspelled_file_is_told_with_its_key_and_neighbor(write, tmp_path):
    write("train.jsonl", GOOD)
    with pytest.raises(InputError, match="^data.train: cannot read .*; did you mean '.*train.jsonl'"):
        load_prompts(tmp_path / "trian.jsonl")


@pytest.mark.parametrize("key", ["run", "data.evaluation.held"])
def test_a_system_prompt_without_chats_is_refused(write, key):
    text, chat = write("text.jsonl", GOOD), write("chat.jsonl", '{"messages": "1", "gt_answer": "1"}\n')

    def load(held):
        source = f"path = '{held}'" + (", system_prompt = 'Think.'" if key != "run" else "")
        run = "system_prompt = 'Think.'\n" if key == "run" else ""
        file = write("run.toml", f"[run]\n{run}[data]\ntrain = '{text}'\nevaluation.held = {{ {source} }}")
        RunData.load(load_config("data", DataSection, file))

    load(chat)
    with pytest.raises(InputError, match=f"^{key}.system_prompt: got one, and no prompt is a chat; allowed: none, or"):
        load(text)


def test_repeated_ids_and_shared_prompts_are_warned_of():
    one = Prompt(id="a", prompt="1", gt_answer="1")
    data = RunData(DataSection(train="t.jsonl"), [Part([one, one])], {"held": [one, one]})
    repeated, again, shared = data.warnings()
    assert repeated.startswith("data.train: 1 ids name several prompts, such as 'a'")
    assert again.startswith("data.evaluation.held: 1 ids name")
    assert shared.startswith("data.evaluation.held: 2 of 2 prompts are training prompts too")


@pytest.mark.parametrize(("said", "warned"), [("So 42.", True), ("<think>\n6*", False), ("First, 142", False)])
def test_chats_that_hold_the_answer_are_warned_of(said, warned):
    chat = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": said}]
    data = RunData(DataSection(), [Part([Prompt(id="a", messages=chat, gt_answer="42")])], {})
    told = [warning for warning in data.warnings() if warning.startswith("data.train: 1 of 1 chats end with the")]
    assert len(told) == warned


@pytest.mark.parametrize(("teacher", "named"), [("big", "big"), (7, ""), (["big"], "")])
def test_a_rows_teacher_is_a_column_too(teacher, named):
    """A data set may have a column of that name, which a reward function reads, and the run no teachers."""
    (prompt,) = parse_rows(
        [("row 1", {"prompt": "2+2", "gt_answer": "4", "teacher": teacher})], "rows", True, {}, "data"
    )
    assert (prompt.teacher, prompt.columns) == (named, {"teacher": teacher})
    assert prompt.to_proto().teacher == named
