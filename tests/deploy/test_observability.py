"""Metrics, alert rules, dashboard and docs use the same names."""

import json
import re
from pathlib import Path

import grpc
import promql_parser
import pytest
import yaml
from metric_names import declared_metrics, literals
from quartet.v1 import broker_pb2, trainer_pb2

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
METRICS = declared_metrics()
SERIES = {series: metric for metric in METRICS.values() for series in metric.series}
PHASES = trainer_pb2.TrainerPhase.DESCRIPTOR.values
# Prometheus' own, its client's, and those of the scrape configuration.
OWN_SERIES = {"up", "process_start_time_seconds"}
OWN_LABELS = {"job", "instance", "service", "le"}


def expressions() -> list[tuple[str, str]]:
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    found = [(rule["alert"], rule["expr"]) for rule in rules]
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return found + [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_an_expression_is_one_of_prometheus_and_asks_for_what_is_there(where, expression):
    promql_parser.parse(expression)  # its grammar and types: `rate` of a gauge's moment or a lost bracket is refused
    names = set(re.findall(rf"\b(?:quartet_[a-z_]+|{'|'.join(OWN_SERIES)})\b", expression))
    assert names and names <= set(SERIES) | OWN_SERIES, where
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        declared = set(SERIES[name].labels) if name in SERIES else set()
        assert labels <= declared | OWN_LABELS, f"{where}: {name}"
    known = {label for name in names & set(SERIES) for label in SERIES[name].labels} | OWN_LABELS
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= known, where


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_label_values_are_those_that_services_write(where, expression):
    for name, selector in re.findall(r"(quartet_\w+)\{([^}]*)\}", expression):
        if name == "quartet_trainer_metric":
            continue  # its names are those of docs/metrics.md: below
        known = literals(SERIES[name].service)
        known |= {field.name for field in broker_pb2.RunStats.DESCRIPTOR.fields}
        known |= {code.name for code in grpc.StatusCode}
        known |= {value.name.removeprefix("TRAINER_PHASE_").lower() for value in PHASES}
        values = {each for value in re.findall(r'"([^"]*)"', selector) for each in value.split("|")}
        assert values and values <= known, f"{where}: {name}"


def test_trainer_metrics_on_the_dashboard_are_documented():
    documented = (ROOT / "docs" / "metrics.md").read_text()
    asked = {
        name
        for _, expression in expressions()
        for name in re.findall(r'quartet_trainer_metric\{name="([^"]+)"', expression)
    }
    assert asked
    assert not [name for name in asked if f"`{name}`" not in documented]
