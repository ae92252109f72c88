"""Models of the hub: found, refused with a sentence, taken from the cache; against a server with the hub's API."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[4] / "tests" / "hub"))
from hub_server import TOKEN, HubServer  # noqa: E402

HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
MODEL = {"config.json": b'{"vocab_size": 32}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
UNUSED = {"pytorch_model.bin": b"pickle", "original/consolidated.safetensors": WEIGHTS, "modeling.py": b"code"}


@pytest.fixture
def hub():
    with HubServer() as server:
        server.add("models", "own/old", MODEL, ref="v1")
        server.add("models", "own/old", {**MODEL, "config.json": b"{}"})
        server.add("models", "own/small", {**MODEL, **UNUSED})
        server.add("models", "own/closed", MODEL, private=True)
        server.add("models", "own/gated", MODEL, gated=True)
        server.add("models", "own/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        yield server


@pytest.fixture
def ask(hub, tmp_path):
    """Ask for a model by settings of [model]; return the exit status and what was printed."""

    def run(*settings: str, **environment: str) -> tuple[int, str]:
        words = [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(
            [sys.executable, "-m", "quartet_common.hub", *words],
            env={**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": "", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (0, 2), done.stderr
        return done.returncode, done.stdout.strip()

    return run


def test_a_model_is_downloaded_once_and_then_taken_from_the_cache(hub, ask):
    status, folder = ask("model.path=own/small")
    assert status == 0 and {path.name for path in Path(folder).iterdir()} == set(MODEL)
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert sum(request.startswith("GET /own/small/resolve") for request in hub.requests) == len(MODEL)
    asked = len(hub.requests)
    assert ask("model.path=own/small", HF_HUB_OFFLINE="1") == (0, folder)
    assert len(hub.requests) == asked, "offline nothing is asked"


def test_a_revision_and_a_token_choose_what_comes(ask):
    for revision, config in (("v1", '{"vocab_size": 32}'), ("", "{}")):
        status, folder = ask("model.path=own/old", f"model.revision={revision}")
        assert status == 0 and (Path(folder) / "config.json").read_text() == config
    assert ask("model.path=own/closed", HF_TOKEN=TOKEN)[0] == 0


@pytest.mark.parametrize(
    ("settings", "environment", "words"),
    [
        (["path=own/smal"], {}, "model.path: there is no folder 'own/smal', and no model of that id at {hub}; allowed"),
        (["path=own/closed"], {}, "and for a private one an HF_TOKEN that may read it"),
        (["path=own/gated"], {"HF_TOKEN": TOKEN}, "model.path: 'own/gated' is gated, and HF_TOKEN has no access to it"),
        (["path=own/small"], {"HF_ENDPOINT": "http://127.0.0.1:1"}, "the hub at http://127.0.0.1:1 does not give the"),
        (["path=.", "revision=v1"], {}, "model.revision: got 'v1'; allowed: empty, unless model.path is the id of a"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(hub, ask, settings, environment, words):
    status, said = ask(*(f"model.{setting}" for setting in settings), **environment)
    assert status == 2 and words.format(hub=hub.address) in said
    assert len(said.splitlines()) == 1, said


TEMPLATE = (
    "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


def words(folder: Path, *added: str) -> Path:
    """Make a folder with a tokenizer of whole words."""
    tokens = {word: place for place, word in enumerate(("[UNK]", "hello", *added))}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def plain(tmp_path):
    """A model of four tokens, without a template."""
    folder = words(tmp_path / "plain", "old")
    (folder / "config.json").write_text('{"vocab_size": 4}')
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return folder


def test_a_tokenizer_its_template_and_arguments_are_in_the_folder_that_all_read(ask, hub, plain, tmp_path):
    hub.add_folder("own/words", words(tmp_path / "words", "new"))
    arguments = "model.template_arguments={enable_thinking = true}"
    settings = (f"model.path={plain}", "model.tokenizer=own/words", "model.chat_template=chat.jinja", arguments)
    status, folder = ask(*settings)
    assert status == 0 and (Path(folder) / "model.safetensors").resolve() == (plain / "model.safetensors").resolve()
    assert ask(*settings) == (0, folder), "made once"
    exported = tmp_path / "exported"  # as the trainer copies what is beside the weights
    shutil.copytree(folder, exported)
    for made in (Path(folder), exported):
        tokenizer = AutoTokenizer.from_pretrained(made)
        chat = [{"role": "user", "content": "hello"}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered == "hello<think>>"
        assert tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False) == "hello", "only a default"
        assert tokenizer.get_vocab() == {"[UNK]": 0, "hello": 1, "new": 2}
    (tmp_path / "chat.jinja").write_text("other")
    assert ask(*settings)[1] != folder, "another template is another folder"


def test_all_templates_of_a_model_take_the_arguments_and_one_replaces_all(ask, plain, tmp_path):
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tool_use.jinja").write_text("tools: " + TEMPLATE)
    chat = [{"role": "user", "content": "hello"}]
    for settings, tool_use in (
        (("model.template_arguments={enable_thinking = true}",), "tools: hello<think>"),
        ((f"model.tokenizer={plain}",), "tools: hello"),
        (("model.chat_template=chat.jinja",), "hello"),
    ):
        status, folder = ask(f"model.path={plain}", *settings)
        assert status == 0, folder
        templates = AutoTokenizer.from_pretrained(folder).chat_template
        name = "tool_use" if isinstance(templates, dict) else None
        rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, chat_template=name, tokenize=False)
        assert rendered == tool_use, settings
