"""The scripts' names."""

from pathlib import Path

import quartet_broker
from quartet_broker import scripts

FOLDER = Path(quartet_broker.__file__).parent / "lua"


def test_every_script_has_a_name_and_every_name_a_script():
    named = {name: each for name, each in vars(scripts).items() if isinstance(each, scripts.Script)}
    assert {name.lower() for name in named} == {path.stem for path in FOLDER.glob("*.lua")}
    for name, each in named.items():
        assert (FOLDER / f"{name.lower()}.lua").read_text() in each.text and len(each.sha) == 40
