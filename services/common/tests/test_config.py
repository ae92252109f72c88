"""The run file: what is wrong is said in one sentence that names the key."""

from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import Field
from quartet.v1 import experience_pb2

from quartet_common.config import ConfigError, RunSection, SamplingSection, load_config
from quartet_common.run_file import RunFile
from quartet_common.run_spec import run_spec
from quartet_common.sections import EnvironmentSection, Section


class RolloutLike(Section):
    engine: str = Field("vllm", pattern="^(vllm|transformers)$", description="The engine.")
    prompts_ahead: int = Field(4, ge=1, description="Prompts taken ahead.")


def load(text: str, tmp_path: Path, *overrides: str):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config("rollout", RolloutLike, path, overrides)


def sentence(text: str, tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("play", True),
        ("plain", True),
        ("spread", True),
        ("make", False),
        ("Game", False),
        ("inner", False),
        ("nothing", False),
    ],
)
def test_a_function_with_arguments_is_served(tmp_path, name, served):
    file = tmp_path / "agent.py"
    file.write_text(
        "async def play(task, endpoint): ...\ndef plain(task, endpoint): ...\ndef spread(\n    task,\n): ...\n"
        "def make(): ...\nclass Game:\n    def inner(self): ...\n"
    )
    by_path = load(f"[run]\nenvironment = '{file}:{name}'", tmp_path).run
    assert by_path.environment.served is served
    assert run_spec(by_path).environment.served is served
    table = load(f"[run]\nenvironment = {{ file = '{file}:{name}', served = {str(not served).lower()} }}", tmp_path).run
    assert table.environment.served is not served


def test_a_served_environment_has_the_contracts_time_unless_it_is_given(tmp_path):
    spec = run_spec(load("[run]\nenvironment = { name = 'x', served = true }", tmp_path).run).environment
    assert spec.served and not spec.HasField("answer_deadline")
    given = "[run]\nenvironment = { name = 'x', served = true, answer_deadline_seconds = 5 }"
    assert run_spec(load(given, tmp_path).run).environment.answer_deadline.seconds == 5


def test_overrides_win_over_the_file_and_other_services_sections_are_left_to_them(tmp_path):
    text = '[rollout]\nengine = "vllm"\n[trainer]\nnobody_here_knows = 1'
    config = load(text, tmp_path, "rollout.engine=transformers", "run.max_steps=7")
    assert config.section.engine == "transformers" and config.run.max_steps == 7


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[rollout]\nengin = 'vllm'", ["unknown key rollout.engin", "run.toml", "did you mean 'engine'"]),
        ("[run]\ngroups_per_step = 65537", ["run.groups_per_step", "less than or equal to 65536"]),
        (f"[run]\nmax_steps = {2**53 + 1}", ["run.max_steps", f"less than or equal to {2**53}"]),
        ("[run]\ngroup_size = 0", ["run.group_size", "got 0", "greater than or equal to 1"]),
        ("x = " + "[" * 5000, ["run.toml is not valid TOML", "nested too deeply"]),
        ("[run]\nmax_steps = " + "1" * 5000, ["run.toml is not valid TOML", "digits"]),
        ("[addresses]\nbroker = 'localhost'", ["addresses.broker", "host:port"]),
        ("[security]\ntls_ca = 'ca.pem'", ["tls_ca, tls_certificate and tls_key go together"]),
        ("[run.sampling]\ntemperature = inf", ["run.sampling.temperature", "got inf", "a finite number"]),
        ("[run.temperature_schedule]\nkind='lineal'\npoints=[[0, 1]]", ["run.temperature_schedule.kind"]),
        (
            "[run.temperature_schedule]\nkind='linear'\npoints=[[0, 1]]",
            ["linear takes at least 2 points and no `updates`; got 1"],
        ),
        (
            "[run.temperature_schedule]\nkind='linear'\npoints=[[0, 1], [5, 0]]",
            ["run.temperature_schedule.points.1.1", "greater than 0"],
        ),
        (
            "[[run.verifiers]]\nname = 'x'\nparameters = { levels = [1, { top = nan }] }",
            ["run.verifiers.0.parameters", "levels[1].top: got nan; allowed: a finite number"],
        ),
    ],
)
def test_a_wrong_file_is_named_in_one_sentence(text, parts, tmp_path):
    said = sentence(text, tmp_path)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    "value", [2**31, 2**63, -(2**63) - 1, 10**400, 1e300], ids=["int32", "int64", "low", "big", "real"]
)
@pytest.mark.parametrize(
    "template",
    [
        *(f"[run]\n{name} = {{}}" for name in RunSection.model_fields),
        *(f"[run.sampling]\n{name} = {{}}" for name in SamplingSection.model_fields),
        *(f"[run.environment]\n{name} = {{}}" for name in EnvironmentSection.model_fields),
        "[run.sampling]\nstop_token_ids = [{}]",
        "[run.temperature_schedule]\nkind = 'colossalchat'\nupdates = {}",
        "[run.temperature_schedule]\nkind = 'constant'\npoints = [[{}, 1.0]]",
    ],
)
def test_a_number_that_is_not_refused_fits_into_the_contract(template, value, tmp_path):
    with suppress(ConfigError):
        run_spec(load(template.format(value), tmp_path).run)


def test_all_that_is_wrong_is_said_at_once_and_where_it_stands(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\ngrup_size = 4\n[rollout]\nprompts_ahead = 0\n[security]\ntls_ca = 'a'\n")
    overrides = ["run.beta=1", "security.tls_key=b", "rollout.nonsense=1"]
    with pytest.raises(ConfigError) as error:
        load_config("rollout", RolloutLike, path, overrides)
    assert error.value.problems == (
        f"unknown key run.grup_size in {path}: did you mean 'group_size'?",
        "unknown key run.beta in --set: TRL's beta is trainer.kl_coefficient here: the KL estimator k3 alone",
        f"security: in {path} and --set: tls_ca, tls_certificate and tls_key go together; only tls_ca, tls_key is set",
        f"rollout.prompts_ahead: got 0 in {path}: input should be greater than or equal to 1",
        "unknown key rollout.nonsense in --set; allowed: engine, prompts_ahead",
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout.num_generations", "TRL's num_generations is run.group_size here"),
        ("actor_rollout_ref.actor.optim.lr", "verl's actor_rollout_ref.actor.optim.lr is trainer.learning_rate here"),
        ("rollout.group_size", "did you mean run.group_size?"),
        ("run.zzz", "; the nearest of 28 allowed: "),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_is_meant(key, said, tmp_path):
    shown = sentence("", tmp_path, f"{key}=1")
    assert said in shown and shown.count(",") < 6


@pytest.mark.parametrize(
    "url", ["redis://user:secret@host:port", "redis://:se/cr?secret@host", "x://host?password=secret&db=0"]
)
def test_the_password_of_a_wrong_url_is_not_shown(url, tmp_path):
    shown = sentence("", tmp_path, f"rollout.engine={url}")
    assert "***" in shown and "secret" not in shown


def test_the_run_section_becomes_the_contracts_spec(tmp_path):
    config = load(
        "[run]\nid='a'\nmax_staleness=0\nlease_order='fresh_first'\n[run.sampling]\ntemperature=0.5\nmax_new_tokens=9\n"
        "[[run.verifiers]]\nname='boxed'\nparameters={correct_reward=2.0}\n"
        "[run.environment]\nname='python_tool'\nmax_turns=3\nscored_text='last_turn'\nanswer_deadline_seconds=2.5\n"
        "[run.environment.parameters]\ntimeout_seconds=5.0",
        tmp_path,
    )
    spec = run_spec(config.run)
    assert spec.HasField("max_staleness") and spec.max_staleness == 0
    assert spec.lease_order == 2
    assert spec.sampling.temperature == 0.5 and spec.sampling.max_new_tokens == 9
    assert spec.evaluation_sampling.n == 1 and spec.evaluation_sampling.temperature == 0.5
    assert spec.verifiers[0].parameters["correct_reward"] == 2.0
    assert spec.prompt_lease_ttl.seconds == 60
    played = spec.environment
    assert (played.name, played.max_turns) == ("python_tool", 3)
    assert (played.max_turn_tokens, played.max_answer_tokens) == (0, 1024)
    assert played.scored_text == experience_pb2.SCORED_TEXT_LAST_TURN and played.answer_deadline.nanos == 500_000_000
    assert dict(played.parameters) == {"timeout_seconds": 5.0}
    assert not run_spec(load("[run]\nid='a'", tmp_path).run).HasField("environment")


@pytest.mark.parametrize(
    ("toml", "curve", "points"),
    [
        ("kind='constant'\npoints=[[0, 0.7]]", "STEP", [(0, 0.7)]),
        ("kind='linear'\npoints=[[0, 1.2], [100, 0.8]]", "LINEAR", [(0, 1.2), (100, 0.8)]),
        ("kind='piecewise'\npoints=[[0, 1], [5, 0.5], [9, 2]]", "STEP", [(0, 1.0), (5, 0.5), (9, 2.0)]),
        # T0 = 1.2, 4 updates: after micro-batches 0, 1, 2, 3 it is 1.2, 1.125, 1.05, 0.975.
        ("kind='colossalchat'\nupdates=4", "LINEAR", [(1, 1.2), (4, 0.975)]),
    ],
)
def test_a_temperature_schedule_becomes_points_and_a_curve(tmp_path, toml, curve, points):
    config = load(f"[run.sampling]\ntemperature=1.2\n[run.temperature_schedule]\n{toml}", tmp_path)
    schedule = run_spec(config.run).temperature_schedule
    assert schedule.curve == experience_pb2.TemperatureCurve.Value(f"TEMPERATURE_CURVE_{curve}")
    assert [point.policy_version for point in schedule.points] == [version for version, _ in points]
    assert [point.temperature for point in schedule.points] == pytest.approx([value for _, value in points])


def test_a_complete_checkpoint_stands_for_the_model_in_it(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert config_of(tmp_path).model.path == tmp_path, "nothing says that it is complete"
    (tmp_path / "manifest.json").write_text('{"step": 3, "files": {"model/config.json": 2}}')
    assert config_of(tmp_path).model.path == tmp_path / "model"
    assert config_of(tmp_path / "model").model.path == tmp_path / "model"
    (tmp_path / "model" / "config.json").unlink()
    assert config_of(tmp_path).model.path == tmp_path, "a file is missing"


def config_of(model):
    return load_config("reader", Section, overrides=[f'model.path="{model}"'])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("id = lab", "'id = lab'; text is in quotes: id = '…'"),
        ('folder = "C:\\runs\\a"', "text is in quotes: folder = '…'"),
        ("group_size: 4", "'group_size: 4'; write group_size = 4"),
        ("sampling_masks = True", "write sampling_masks = true"),
        ("max_steps = None", "leave max_steps out for its default: TOML has no None"),
        ("[run]", "a section is written once: join the two"),
        ('id = "lab', "close the quotes on the same line"),
        ("group_size = 4 // completions", "one key a line; a comment begins with #"),
    ],
)
def test_a_line_that_is_not_toml_is_shown_with_its_cure(line, said, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"[run]\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        RunFile.read(file, [])
    assert "is not valid TOML: " in str(refused.value) and said in str(refused.value)


def test_a_password_of_an_unquoted_address_is_not_shown(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[broker]\nredis_url = redis://me:secret@host/0\n")
    with pytest.raises(ConfigError) as refused:
        RunFile.read(file, [])
    assert "secret" not in str(refused.value) and "text is in quotes: redis_url = '…'" in str(refused.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.zzz=a", "unknown key model.zzz in --set; allowed: "),
        ("model.name=a", "unknown key model.name in --set: prime-rl's model.name is model.path here"),
        ("orchestrator.batch_size=8", "prime-rl's orchestrator.batch_size is run.groups_per_step here: prompts of an"),
        ("run.verifiers=['reward:close']", 'a function is in a Python file: "reward.py:close"'),
        ("run.verifiers=[{name='math', weight=0}]", "every weight is 0"),
        ("run.labels=['a']", "input should be a table, { NAME = … }"),
        ("run.sampling.stop='a'", "input should be a list, [ … ]"),
        ("run.n_samples_per_prompt=8", "OpenRLHF's n_samples_per_prompt is run.group_size here"),
        ("server.metrics_port=1", "did you mean 'metrics_port_offset'?"),
        ("addresses.broker=http://127.0.0.1:7101", "addresses.broker: got 'http://127.0.0.1:7101' in --set"),
        ("model.path=~/model", "model.path: got '~/model'; nothing is expanded here: write '/"),
        ("run.verifiers=['$HOME/r.py:close']", "run.verifiers[0]: got '$HOME/r.py:close'; nothing is expanded here"),
        ("trianer.learning_rate=1", "unknown section [trianer] in --set: did you mean 'trainer'?"),
        ("group_size=4", "e.g. run.group_size=4"),
    ],
)
def test_a_mistake_of_the_first_day_is_told_with_what_works(override, told):
    with pytest.raises(ConfigError) as refused:
        load_config("broker", Section, None, [override])
    assert told in str(refused.value)
