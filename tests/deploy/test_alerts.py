"""The alert rules, tried by promtool on the scenarios of alert_scenarios.yaml."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "preloaded"))
from prometheus_tools import NoPrometheus, prometheus_tool  # noqa: E402

RULES = HERE.parents[1] / "deploy" / "observability" / "alerts.yaml"
ANNOTATIONS = {
    rule["alert"]: " ".join(rule["annotations"].values())
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
}
KNOWN = yaml.safe_load((HERE / "alert_scenarios.yaml").read_text())
USUAL, SCENARIOS = KNOWN["usual"], KNOWN["scenarios"]
MINUTES = 600


@cache
def promtool() -> str:
    try:
        return prometheus_tool("promtool")
    except NoPrometheus as why:
        pytest.skip(str(why))


def located(series: str) -> str:
    """Return a series with the labels that its scraping adds."""
    name, _, labels = series.rstrip("}").partition("{")
    of_all = re.search(r'service="(\w+)"', labels)
    service = of_all[1] if of_all else name.split("_")[1]
    added = [f'instance="{service}:1"', 'job="quartet"', *([] if of_all else [f'service="{service}"'])]
    return f"{name}{{{','.join([*filter(None, [labels]), *added])}}}"


def values(given: Any) -> str:
    """Return promtool's notation."""
    text = str(given)
    if "x" in text or " " in text:
        return text
    return f"{text}x{MINUTES}" if "+" in text else f"{text}+0x{MINUTES}"


def expected(alert: str) -> dict[str, Any]:
    """Return the query for a firing alert that has each label which its annotations show."""
    shown = "".join(f',{label}!=""' for label in sorted(set(re.findall(r"\$labels\.(\w+)", ANNOTATIONS[alert]))))
    query = f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"{shown}}})'
    return {"expr": query, "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_these_alerts_fire_and_no_others(name, tmp_path):
    scenario = SCENARIOS[name]
    fires = scenario["fires"]
    assert not set(fires) & set(scenario.get("spares", ()))
    series = USUAL | scenario.get("series", {})
    all_firing = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in fires],
    }
    queries = [all_firing, *map(expected, fires)]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": located(each), "values": values(given)} for each, given in series.items() if given is not None
        ],
        "promql_expr_test": [{"eval_time": scenario.get("at", "90m"), **query} for query in queries],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    answer = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_rule_is_fired_by_a_scenario_and_spared_by_another():
    named = {
        kind: {alert for each in SCENARIOS.values() for alert in each.get(kind, ())} for kind in ("fires", "spares")
    }
    assert named["fires"] == named["spares"] == set(ANNOTATIONS)


def test_annotations_use_functions_of_prometheus(tmp_path):
    """A misspelled one is found only when the alert fires; `check rules` parses the templates."""
    answer = subprocess.run([promtool(), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
