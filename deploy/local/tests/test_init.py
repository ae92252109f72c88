"""What `quartet init` writes passes the dry run and trains."""

import json
from pathlib import Path

import pytest
from launched import Launched

pytestmark = pytest.mark.timeout(600)
SMALL = ("run.max_steps=2", "run.group_size=2", "run.groups_per_step=2", "rollout.engine=transformers")


def test_init_then_dry_run_then_run(launch, model, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    rows = [json.dumps({"question": f"1+{number}=?", "answer": 1 + number}) for number in range(8)]
    for name in ("train", "heldout"):
        (mine / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

    def do(*words: object, command: tuple[str, ...]) -> Launched:
        launched = launch(*words, command=command)
        assert launched.wait(300) == 0, launched.said()
        return launched

    do(mine, "--model", model, command=("init",))
    do(mine / "run.toml", "--dry-run", command=("run",))
    settings = (*SMALL, f"run.folder={tmp_path / 'run'}")
    do(mine / "run.toml", *(word for each in settings for word in ("--set", each)), command=("run", "--plain"))
    rows = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [0, 1]
    assert all({"reward/correct/mean", "reward/short/mean"} <= row.keys() for row in rows if row["kind"] == "step")
    assert {row["set"] for row in rows if row["kind"] == "evaluation"} == {"heldout"}
