"""Chats are rendered as transformers renders them, or refused by the name of what the template would drop."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from quartet.v1 import broker_pb2, experience_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quartet_common.chats import as_json, continued_text, to_chat
from quartet_common.config import ConfigError, ModelSection, load_config
from quartet_common.log import collected_warnings
from quartet_rollout.chats import text_before_continued
from quartet_rollout.config import RolloutSection
from quartet_rollout.generation import PromptRefused
from quartet_rollout.prompt_check import check_prompts, warn_of_missing_special_token
from quartet_rollout.prompts import PromptReader

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}</s>{% endfor %}"
)
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "tools": "{% if tools is not none %}{{ tools | tojson }}{% endif %}" + TURNS + END,
    "documents": "{% if documents %}{{ documents[0] }}{% endif %}" + TURNS + END,
    "ascii": "{{ messages[0] | tojson(ensure_ascii=False) }}" + TURNS + END,
    "special tokens": "{{ bos_token + messages[0].role }}" + TURNS + END,
    "generation": "{% generation %}" + TURNS + "{% endgeneration %}" + END,
    "date": "{{ strftime_now('%Y')[:2] }}{% if thinking is defined %}{{ thinking }}{% endif %}" + TURNS + END,
    "no developer": "{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endfor %}" + END,
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}" + END,
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds «é»", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Zwei plus zwei, né?"}


def save_tokenizer(folder: Path, template: str) -> Path:
    """A byte-level tokenizer whose special token is in no file but special_tokens_map.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    beneath = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    beneath.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    beneath.decoder = decoders.ByteLevel()
    beneath.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 400}')
    return folder


@pytest.fixture
def check(tmp_path):
    """Check rows as `--dry-run` does, with a template."""

    def run(name: str, *rows: dict, **settings: object) -> None:
        save_tokenizer(tmp_path, TEMPLATES[name])
        data = tmp_path / "train.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        overrides = [f"{key}={value}" for key, value in settings.items()]
        config = load_config("rollout", RolloutSection, None, ["run.sampling.max_new_tokens=8", *overrides])
        config = replace(config, model=ModelSection(path=tmp_path), data={"train": str(data)})
        check_prompts(config, None)

    return run


def render(
    folder: Path, name: str, chat: experience_pb2.Chat, system_prompt: str = ""
) -> tuple[str, PreTrainedTokenizerFast]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(folder, TEMPLATES[name]))
    reader = PromptReader(tokenizer, 4000)
    spec = broker_pb2.RunSpec(system_prompt=system_prompt)
    token_ids, _ = reader.read(experience_pb2.Prompt(chat=chat), spec, experience_pb2.PURPOSE_TRAIN)
    return reader.text(token_ids), tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_rendered_as_transformers_does(name, tmp_path, check):
    text, tokenizer = render(tmp_path, name, to_chat([USER]))
    assert text == tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    check(name, {"messages": [USER]})


def test_tools_calls_and_answers_are_rendered(tmp_path, check):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "call-1"},
    ]
    text, tokenizer = render(tmp_path, "tools", to_chat(messages, TOOLS))
    assert text == tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    check("tools", {"messages": messages, "tools": json.dumps(TOOLS)})


@pytest.mark.parametrize("content", ["<think>\nLet me", "Let me ", ""])
@pytest.mark.parametrize("name", ["tools", "trimmed"])
def test_a_last_message_of_the_assistant_is_continued(name, content, tmp_path):
    messages = [USER, {"role": "assistant", "content": content}]
    chat = to_chat(messages)
    text, tokenizer = render(tmp_path, name, chat)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text.endswith(f"<assistant>{content.strip() if name == 'trimmed' else content}")
    assert text_before_continued(text, chat).endswith("<assistant>") and continued_text(chat) == content
    assert json.loads(as_json(chat)) == [USER]


def test_the_system_prompt_is_not_added_to_a_developers(tmp_path):
    developer = {"role": "developer", "content": "Be brief."}
    text, _ = render(tmp_path, "tools", to_chat([developer, USER]), system_prompt="Be long.")
    assert "Be brief." in text and "Be long." not in text


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("ascii", {"messages": [USER], "tools": TOOLS}, "prompt.chat.tools: got tools, which"),
        (
            "no developer",
            {"messages": [{"role": "developer", "content": "a"}, USER]},
            "got the role 'developer', which",
        ),
        (
            "date",
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            "got 'enable_thinking', which",
        ),
        (
            "trimmed",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"name": "f"}]},
                    {"role": "tool", "content": "1"},
                ]
            },
            "prompt.chat.messages[1].tool_calls: got tool calls, which",
        ),
        (
            "tools",
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            "got tool calls of the assistant in the last message",
        ),
        ("special tokens", {"messages": [{"role": "user", "content": "x" * 400}]}, "prompt.input: got 426 tokens"),
        (
            "trimmed",
            {"messages": [USER], "sampling": {"max_new_tokens": 400}},
            "sampling.max_new_tokens: got 400; allowed: ",
        ),
    ],
)
def test_what_a_template_ignores_is_refused_in_the_dry_run(name, row, field, check):
    with pytest.raises(ConfigError) as caught:
        check(name, {"messages": [USER]}, row)
    assert "train.jsonl, line 2: " in str(caught.value) and field in str(caught.value)


def test_variables_of_the_template_are_given_to_it(tmp_path, check):
    text, _ = render(tmp_path, "date", to_chat([USER], arguments={"thinking": "deeply"}))
    assert text.startswith("20deeply<user>")
    check("date", {"messages": [USER], "chat_template_kwargs": {"thinking": "deeply"}})


def test_json_that_is_none_is_refused_by_its_field(tmp_path):
    chat = to_chat([USER])
    chat.tools = "[1"
    with pytest.raises(PromptRefused, match=r"prompt.chat.tools: got '\[1'; allowed: a JSON array"):
        render(tmp_path, "tools", chat)


def test_lengths_are_of_the_rendered_prompt_with_system_prompt_and_tools(check):
    chat = {"messages": [{"role": "user", "content": "x" * 300}]}
    check("tools", chat)
    with pytest.raises(ConfigError, match="line 1: prompt.input: got 4.. tokens; allowed: at most 392: the model's"):
        check("tools", {**chat, "tools": TOOLS})
    with pytest.raises(ConfigError, match="line 1: prompt.input: got 4.. tokens"):
        check("tools", chat, **{"run.system_prompt": "y" * 100})


def test_a_text_begins_with_the_tokenizers_special_token_if_the_run_says_so(tmp_path, check):
    save_tokenizer(tmp_path, "")
    file = tmp_path / "tokenizer.json"
    beneath = Tokenizer.from_file(str(file))
    beneath.add_special_tokens(["<s>"])
    beneath.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", beneath.token_to_id("<s>"))])
    beneath.save(str(file))
    reader = PromptReader(PreTrainedTokenizerFast.from_pretrained(tmp_path), 100)
    for wanted in (False, True):
        spec = broker_pb2.RunSpec(add_special_tokens=wanted)
        token_ids, _ = reader.read(experience_pb2.Prompt(text="hi"), spec, experience_pb2.PURPOSE_TRAIN)
        assert reader.text(token_ids) == ("<s>hi" if wanted else "hi")
        data = tmp_path / "train.jsonl"
        data.write_text('{"prompt": "<s>has it"}\n{"prompt": "hi"}\n')
        config = load_config("rollout", RolloutSection, None, [f"run.add_special_tokens={str(wanted).lower()}"])
        config = replace(config, model=ModelSection(path=tmp_path), data={"train": str(data)})
        with collected_warnings() as told:
            warn_of_missing_special_token(config)
        assert not told if wanted else "line 2: texts of this model begin with '<s>'" in told[0]
