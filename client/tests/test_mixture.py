"""Training prompts of several sources: shares, passes, ids, and what is refused."""

from itertools import islice

import pytest

from quartet_client.data import DataSection, RunData
from quartet_client.errors import InputError
from quartet_client.mixture import Part, mix
from quartet_client.prompts import Prompt
from quartet_common.config import ConfigError, load_config


def part(name: str, prompts: int, weight: float = 1.0) -> Part:
    return Part([Prompt(prompt=f"{name}{n}", gt_answer="1") for n in range(prompts)], name, weight)


def data(*parts: Part, **section) -> RunData:
    return RunData(DataSection(**section), list(parts), {})


@pytest.mark.parametrize("weights", [(3, 1), (1, 1, 1), (0.7, 0.2, 0.1), (100, 1), (5, 3, 1, 1, 0.5)])
def test_the_shares_hold_at_every_prefix(weights):
    parts = [part(f"s{n}", 7 + n, weight) for n, weight in enumerate(weights)]
    used = dict.fromkeys((each.name for each in parts), 0)
    for position, use in enumerate(islice(mix(parts, 0, "first_exhausted"), 3000), start=1):
        used[use.part.name] += 1
        for each in parts:
            assert abs(used[each.name] - position * each.weight / sum(weights)) <= max(1, len(parts) - 1)


@pytest.mark.parametrize(
    ("strategy", "passes", "used"),
    [
        ("first_exhausted", 1, {"a": 4, "b": 4}),
        ("first_exhausted", 2, {"a": 8, "b": 8}),
        ("all_exhausted", 1, {"a": 10, "b": 10}),
        ("all_exhausted", 2, {"a": 20, "b": 20}),
    ],
)
def test_a_pass_ends_with_the_first_or_with_all_sources(strategy, passes, used):
    both = data(part("a", 4), part("b", 10), passes=passes, stopping_strategy=strategy)
    instances = list(both.training_instances())
    assert len(instances) in (sum(used.values()), sum(used.values()) - 1)  # the last source alone may be left out
    assert abs(sum(one.source == "a" for one in instances) - used["a"]) <= 1
    assert len({one.instance_id for one in instances}) == len(instances)
    numbers = [one.data_pass for one in instances]
    assert numbers == sorted(numbers) and set(numbers) == set(range(passes))  # the broker forgets passes in this order


def test_a_strategy_for_one_source_is_warned_of():
    told = "data.stopping_strategy: without effect, as data.train is one source; leave it out, or name several"
    assert told in data(part("a", 4), stopping_strategy="all_exhausted").warnings()
    assert told not in data(part("a", 4)).warnings()
    assert told not in data(part("a", 4), part("b", 4), stopping_strategy="all_exhausted").warnings()


def test_each_source_has_passes_and_an_order_of_its_own():
    both = data(part("a", 3), part("b", 30), stopping_strategy="all_exhausted")
    of_a = [one for one in both.training_instances() if one.source == "a"]
    passes = [sorted(one.instance_id for one in of_a[n : n + 3]) for n in range(0, 30, 3)]
    assert passes == [[f"pass-{n}/a/{place}" for place in range(3)] for n in range(10)]
    assert len({tuple(one.instance_id.rpartition("/")[2] for one in of_a[n : n + 3]) for n in range(0, 30, 3)}) > 1
    assert of_a[0].prompt.text == f"a{of_a[0].instance_id[-1]}"


def test_a_feeder_that_starts_again_yields_the_same_sequence():
    def read(seed: int):
        made = data(part("a", 5, 2), part("b", 9), passes=3, shuffle_seed=seed)
        return [one.SerializeToString(deterministic=True) for one in made.training_instances()]

    assert read(1) == read(1) != read(2)


def test_a_single_source_has_the_ids_and_order_of_before():
    one = data(part("", 4), passes=2)
    instances = list(one.training_instances())
    assert not any(each.source for each in instances)
    assert {each.instance_id for each in instances} == {f"pass-{p}/{n}" for p in range(2) for n in range(4)}


ROWS = '{"prompt": "1", "gt_answer": "1"}\n{"prompt": "2", "gt_answer": "2"}\n'
TWICE = '{"prompt": "1", "gt_answer": "1", "id": "x"}\n{"prompt": "2", "gt_answer": "2", "id": "x"}\n'


@pytest.fixture
def load(write):
    """Load [data] with two files; `run` has further sections."""

    def _load(keys: str, run: str = "") -> RunData:
        a, b, c = write("a.jsonl", ROWS), write("b.jsonl", ROWS), write("c.jsonl", TWICE)
        text = f"[data]\n{keys.replace('A', str(a)).replace('B', str(b)).replace('C', str(c))}\n{run}"
        return RunData.load(load_config("data", DataSection, write("run.toml", text)))

    return _load


def test_sources_are_paths_or_tables_and_named_by_their_files(load):
    made = load("train = ['A', {path = 'B', weight = 3, source = 'other'}]")
    assert [(each.name, each.weight, len(each.prompts)) for each in made.parts] == [("a", 1, 2), ("other", 3, 2)]
    assert not list(made.warnings())  # "line-1" of both is no repeated id


MIXTURES = {
    "train = [{path = 'A', weight = 0}, 'B']": "data.train.0.weight: got 0 .*greater than 0",
    "train = [{path = 'A', weight = -1}, 'B']": "data.train.0.weight: got -1",
    "train = [{path = 'A', weight = inf}, 'B']": "data.train.0.weight: got inf .*finite",
    "train = ['A', 'A']": r"several sources are named 'a'; give each its own name, source = \"NAME\"",
    "train = []": "data.train: got .* at least 1 item",
    "train = [{path = 'A', wieght = 2}]": "unknown key data.train.0.wieght .*did you mean 'weight'",
    "train = {path = 'A', weight = 2}": "weight belongs to one of several sources; allowed: in a list",
    "train = [{path = 'A', name = 'x'}]": 'in a list of sources, source = "NAME" names it',
    "train = [{path = 'A', source = 'a/b'}]": "data.train.0.source: got 'a/b' .*allowed: 1 to 64 of",
    "train = ['A', 'gone.jsonl']": r"data.train\[1\]: cannot read 'gone.jsonl'",
    "train = 'A'\nstopping_strategy = 'both'": "data.stopping_strategy: got 'both' .*'first_exhausted' or",
}


@pytest.mark.parametrize("keys", MIXTURES)
def test_a_mixture_that_cannot_be_is_refused(load, keys):
    with pytest.raises((ConfigError, InputError), match=MIXTURES[keys]):
        load(keys)


CURRICULA = {
    ("by = 'sorce'", "train = 'A'"): "run.curriculum.by: got 'sorce'",
    ("window = 0", "train = 'A'"): "run.curriculum.window: got 0",
    (
        "solved_above = 0.2\nhopeless_below = 0.5",
        "train = 'A'",
    ): r"hopeless_below: got 0.5 .*at most solved_above \(0.2",
    ("solved_above = 1\nhopeless_below = 0", "train = 'A'"): "nothing is skipped; leave the section out",
    ("floor = 1.0", "train = 'A'"): "run.curriculum.floor: got 1.0",
    ("by = 'source'", "train = 'A'"): "data.train is one source, which would be skipped as a whole",
    ("", "train = 'C'"): "id 'x' names several prompts, whose answers would count as one",
    ("", "train = ['A', 'C']"): "id 'x' names several prompts",
    ("floor = 0", "train = 'A'\npasses = 0"): "got 0 with data.passes = 0: .*allowed: a floor above 0",
    ("[run]\nverifiers = ['length']", "train = ['A', 'B']"): r"no verifier judges the answers of source 'a' \(length\)",
}


@pytest.mark.parametrize(("curriculum", "keys"), CURRICULA)
def test_a_curriculum_that_cannot_follow_the_prompts_is_refused(load, curriculum, keys):
    run = "" if curriculum.startswith("[run]") else "[run]"
    with pytest.raises((ConfigError, InputError), match=CURRICULA[curriculum, keys]):
        load(keys, f"[run.curriculum]\n{curriculum}\n{run}\nmax_steps = 9")


def test_a_curriculum_in_the_data_section_is_told_its_place(load):
    with pytest.raises(ConfigError, match="unknown key data.curriculum .*did you mean run.curriculum"):
        load("train = 'A'\ncurriculum = {window = 2}")
