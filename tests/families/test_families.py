"""Model families, from a folder to a weight update during generation.

`make families` runs all, also on two ranks with every plugin, and writes the results to `results.json`, from which
docs/models.md is generated. If FAMILIES is unset, six different families, each with one engine, are compared with that
file.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import models
import pytest
from sides import Orders, Refused

from quartet_common.ports import free_port

sys.path.append(str(Path(__file__).resolve().parents[1] / "preloaded"))
from preloaded import Pythons  # noqa: E402 (beside the other suites' tests)

RESULTS = Path(__file__).with_name("results.json")
ALL = os.environ.get("FAMILIES", "")
"""Unset: six; "all"; or some names."""
SIX = {
    "qwen3": "vllm", "gemma2": "vllm", "gpt2": "vllm", "falcon_h1": "vllm", "granitemoe": "vllm",
    "gpt_oss": "transformers",
}  # fmt: skip
CHOSEN = tuple(models.FAMILIES) if ALL == "all" else tuple(ALL.split())
ENGINES = ("vllm", "transformers")
PLUGINS: dict[str, dict[str, Any]] = {
    "low_level_zero": {"plugin": "low_level_zero"},
    "torch_fsdp": {"plugin": "torch_fsdp"},
    "gemini": {"plugin": "gemini", "precision": "bf16"},
    "tp 2": {"plugin": "hybrid_parallel", "tp_size": 2},
    "pp 2": {"plugin": "hybrid_parallel", "pp_size": 2},
}
NEAR = 1e-4
"""Tolerance of log-probs between rollout and trainer, both in fp32."""
OTHER_ROUTERS = ("phimoe", "dbrx")
"""Mixtures of experts whose routers take no top k of one row of scores."""
BEGUN = 16
pytestmark = pytest.mark.timeout(600)  # the first test includes the imports


class Sides:
    """The processes, each started at its first request, and again after a crash."""

    def __init__(self, folder: Path, pythons: Pythons) -> None:
        self._folder, self._pythons = folder, pythons
        self._running: dict[str, Orders] = {}

    def start(self, name: str, program: str, environment: str, **variables: str) -> Orders:
        if name not in self._running or self._running[name].ended:
            python = self._pythons["vllm" if environment == "rollout" else environment]
            self._running[name] = Orders(program, environment, self._folder / f"{name}.log", python, variables)
        return self._running[name]

    @property
    def trainer(self) -> Orders:
        return self.start("trainer", "trainer_side.py", "trainer")

    @property
    def rollout(self) -> Orders:
        return self.start("rollout", "rollout_side.py", "rollout")

    def ranks(self) -> list[Orders]:
        ranks = [self._running.get(f"rank-{rank}") for rank in range(2)]
        if any(each is None or each.ended for each in ranks):
            self.end_ranks()
            place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            for rank in range(2):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.start(f"rank-{rank}", "trainer_side.py", "trainer", **place, **own)
        return [self._running[f"rank-{rank}"] for rank in range(2)]

    def end_ranks(self) -> None:
        for rank in range(2):
            if (running := self._running.pop(f"rank-{rank}", None)) is not None:
                running.close()

    def close(self) -> None:
        for orders in self._running.values():
            orders.close()


@pytest.fixture(scope="session")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with closing(Pythons()) as pythons, closing(Sides(tmp_path_factory.mktemp("sides"), pythons)) as sides:
        _ = sides.rollout, sides.trainer  # start both imports
        yield sides


@pytest.fixture(scope="session")
def folders(sides: Sides, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a family's model, and an engine's completions, if any."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            sides.trainer(do="save", family=family, folder=str(made[family] / "model"))
        return made[family]

    return folder


def note(family: str, column: str, found: dict[str, Any]) -> None:
    """Compare a result, numbers or {"refused": reason}, with the stored one; with `FAMILIES` store it."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = known.get(family, {}).get(column)
    if ALL:
        rounded = {key: float(f"{of:.1e}") if isinstance(of, float) else of for key, of in found.items()}
        known.setdefault(family, {})[column] = rounded
        lines = [f'"{family}": {json.dumps(known[family])}' for family in models.FAMILIES if family in known]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if not ALL or before is not None:
        assert before is not None and ("refused" in before) == ("refused" in found), f"was {before}, is {found}"


@pytest.mark.parametrize(("family", "engine"), list(itertools.product(CHOSEN, ENGINES)) if ALL else SIX.items())
def test_family_log_probs_agree_during_an_update(family: str, engine: str, sides: Sides, folders: Any) -> None:
    """The engine's tokens have the trainer's log-probs, before and after a step, also those of completions during the
    update."""
    place = folders(family)
    replay = engine == "transformers" and family in models.EXPERT and family not in OTHER_ROUTERS
    try:
        found = through(sides, engine, place, replay)
    except Refused as refused:
        found = refused.found
    finally:
        with suppress(Refused):
            sides.rollout(do="stop")
    if "refused" not in found and max(found["before"], found["after"]) > NEAR:
        when = f"{found['before']:.2g} before an update, {found['after']:.2g} after it"
        found = {"refused": f"log-probs of rollout and trainer differ: {when}", "by": "both"}
    note(family, engine, found)


def through(sides: Sides, engine: str, place: Path, replay: bool) -> dict[str, float]:
    """Load, generate, step, update during generation, step; return the largest differences of log-probs before and
    after the update. With `replay` the trainer uses the engine's choice of experts.

    Raises Refused.
    """
    published = place / f"published-{engine}"
    published.mkdir()
    groups = sides.rollout(do="start", engine=engine, folder=str(place / "model"))
    (place / "groups.json").write_text(json.dumps(groups))
    assert replay == (groups[0]["completions"][0]["experts"] is not None)
    sides.trainer(do="load", folder=str(place / "model"), router_replay=replay)
    first = sides.trainer(do="step", groups=groups, version=0)
    manifest = sides.trainer(do="publish", folder=str(published))
    updated = sides.rollout(do="update", manifest=manifest, folder=str(published))
    spans = [completion["spans"] for group in updated["met"] for completion in group["completions"]]
    versions = [[version for version, *_ in each] for each in spans]
    assert [0, 1] in versions and all(each in ([0], [1], [0, 1]) for each in versions), spans
    assert all(
        completion["spans"] == [[1, 0, len(completion["tokens"])]]
        for group in updated["after"]
        for completion in group["completions"]
    )
    met = [{**group, "completions": [begun(each) for each in group["completions"]]} for group in updated["met"]]
    second = sides.trainer(do="step", groups=[*met, *updated["after"]], version=1)
    if replay:  # the engine's experts equal those of the trainer's routers, except for rounding
        assert max(first["router_disagreement"], second["router_disagreement"]) < 0.01
    # A control: without the update these would be equal.
    stayed = sides.trainer(do="stayed", folder=str(place / "model"), groups=updated["after"])
    assert stayed > 100 * NEAR, stayed
    return {
        "before": first["log_prob_diff_max"],
        "after": second["log_prob_diff_max"],
        "mismatch_kl": max(first["mismatch_kl"], second["mismatch_kl"]),
    }


def begun(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion up to the first tokens of its last weights. Their number depends on timing, and of
    thousands of tokens rounding may route one to a different expert."""
    version, start, end = completion["spans"][-1]
    end = min(end, start + BEGUN)
    return {
        "tokens": completion["tokens"][:end],
        "log_probs": completion["log_probs"][:end],
        "spans": [*completion["spans"][:-1], [version, start, end]],
        "experts": completion["experts"] and completion["experts"][: end - len(completion["tokens"]) or None],
    }


@pytest.mark.parametrize("family", models.TO_THE_END)
def test_log_probs_up_to_the_end_of_the_context(family: str, sides: Sides, folders: Any) -> None:
    place, (longest, _) = folders(family), models.TO_THE_END[family]
    groups = sides.rollout(do="start", engine="transformers", folder=str(place / "model"), lengths=(1000, 1000))
    sides.rollout(do="stop")
    sizes = {len(group["prompt"] + each["tokens"]) for group in groups for each in group["completions"]}
    assert sizes == {longest}
    sides.trainer(do="load", folder=str(place / "model"))
    assert sides.trainer(do="step", groups=groups, version=0)["log_prob_diff_max"] < NEAR


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("family", CHOSEN)
def test_family_trains_over_two_ranks(family: str, plugin: str, sides: Sides, folders: Any) -> None:
    """Loss, gradient norm and log-probs equal those of one process."""
    place = folders(family)
    if not (place / "groups.json").exists():
        pytest.skip("no engine generates with it")
    groups = json.loads((place / "groups.json").read_text())
    half = PLUGINS[plugin].get("precision") == "bf16"
    ranks = sides.ranks()
    try:
        sides.trainer(do="load", folder=str(place / "model"))
        expected = sides.trainer(do="step", groups=groups, version=0)
        for rank in ranks:
            rank.give(do="load", folder=str(place / "model"), settings=PLUGINS[plugin])
        for rank in ranks:
            rank.answer()
        for rank in ranks:
            rank.give(do="step", groups=groups, version=0)
        first, second = [rank.answer() for rank in ranks]
        assert first["loss"] == second["loss"]
        found = {
            "log_prob_diff_mean": first["log_prob_diff_mean"],
            "grad_norm": abs(first["grad_norm"] / expected["grad_norm"] - 1),
        }
        if found["log_prob_diff_mean"] > (0.05 if half else NEAR) or found["grad_norm"] > (0.05 if half else 1e-3):
            differ = ", ".join(f"{key} {value:.2g}" for key, value in found.items())
            found = {"refused": f"other numbers than one process: {differ}", "by": "trainer"}
    except Refused as refused:
        found = refused.found
        sides.end_ranks()  # one may be waiting for the other
    note(family, plugin, found)


if not ALL:
    del test_family_trains_over_two_ranks
