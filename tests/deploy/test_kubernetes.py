"""The kustomize base and overlays: built, valid by Kubernetes' schemas, in agreement with the services."""

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet_client.authority import EXPORTED
from quartet_common import __version__
from quartet_common.config import AddressesSection, SecuritySection, load_config
from quartet_common.identity import SERVERS, allowed_roles
from quartet_server.probe import AnySection

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
RUN_FILE = KUBERNETES / "base" / "run.toml"
DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
sys.path.append(str(ROOT / "tests" / "preloaded"))
from fixtures import model, pythons  # noqa: E402, F401

OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = (*SERVERS, "client")
PORTS = {kind: int(getattr(AddressesSection(), kind).rpartition(":")[2]) for kind in SERVERS}
LEAST_VERSION = re.search(r"Kubernetes (1\.\d+)\*\* or later", DOCS)[1]
COMPONENT, PART = "app.kubernetes.io/component", "app.kubernetes.io/part-of"
FILES = dict(zip(("tls_ca", "tls_certificate", "tls_key"), EXPORTED, strict=True))
CALLERS = (*COMPONENTS, "redis", "stranger")

needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="kubectl, which builds the overlays, is not here"
)
pytestmark = needs_kubectl


@functools.cache
def built(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@functools.cache
def objects(overlay: str) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built(overlay))}


def of_kind(overlay: str, kind: str) -> dict[str, Any]:
    return {name: each for (found, name), each in objects(overlay).items() if found == kind}


def workloads(overlay: str) -> dict[str, Any]:
    return {
        name: each for kind in ("Deployment", "StatefulSet", "Job") for name, each in of_kind(overlay, kind).items()
    }


def pod(overlay: str, name: str) -> Any:
    return workloads(overlay)[name]["spec"]["template"]


def container(overlay: str, name: str) -> Any:
    (only,) = pod(overlay, name)["spec"]["containers"]
    return only


def versions() -> list[str]:
    """Return the least version that the docs state, and the newest that kubernetes-validate knows."""
    validate = Path(sys.executable).parent / "kubernetes-validate"
    newest = subprocess.run([validate, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    return [f"{LEAST_VERSION}.0", re.search(r"[\d.]+", newest)[0]]


def test_overlays_fit_the_schemas_of_the_least_version_and_the_newest(tmp_path):
    """Strictly: a misspelled key is refused. The operator's PodMonitor has no schema there."""
    files = []
    for overlay in OVERLAYS:
        files.append(tmp_path / f"{overlay}.yaml")
        known = [each for (kind, _), each in objects(overlay).items() if kind != "PodMonitor"]
        files[-1].write_text(yaml.safe_dump_all(known))
    for version in versions():
        command = [Path(sys.executable).parent / "kubernetes-validate", "--strict", "--quiet", "-k", version, *files]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, f"{version}: {answer.stdout}{answer.stderr}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_the_labels_of_pods(overlay):
    labels = {name: pod(overlay, name)["metadata"]["labels"] for name in workloads(overlay)}
    assert set(labels) >= set(COMPONENTS) and all(each[PART] == "quartet" for each in labels.values())
    assert all(labels[name][COMPONENT] == name for name in labels)
    for name, workload in workloads(overlay).items():
        if workload["kind"] != "Job":
            assert workload["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for kind in ("Service", "PodDisruptionBudget"):
        for name, each in of_kind(overlay, kind).items():
            selector = each["spec"]["selector"]
            assert selector.get("matchLabels", selector).items() <= labels[name].items()
    assert set(of_kind(overlay, "PodDisruptionBudget")) == {"broker", "reward", "environment", "rollout"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_are_headless_at_the_services_own_ports_and_addresses_are_their_names(overlay):
    addresses = load_config("broker", AnySection, RUN_FILE).addresses
    for kind in SERVERS:
        service = objects(overlay)["Service", kind]["spec"]
        assert service["clusterIP"] == "None", "callers see all pods, and share their calls among them"
        assert [(port["name"], port["port"]) for port in service["ports"]] == [("grpc", PORTS[kind])]
        ports = {port["name"]: port["containerPort"] for port in container(overlay, kind)["ports"]}
        assert (ports["grpc"], ports["metrics"]) == (PORTS[kind], PORTS[kind] + 100)
        assert getattr(addresses, kind) == f"{kind}:{PORTS[kind]}"
    for kind in ("rollout", "trainer"):
        assert objects(overlay)["Service", kind]["spec"]["publishNotReadyAddresses"], "they load for long"
    assert container(overlay, "rollout")["args"] == ["--set", "addresses.rollout=$(POD_NAME).rollout:7103"]
    assert workloads(overlay)["rollout"]["spec"]["serviceName"] == "rollout"
    assert workloads(overlay)["rollout"]["spec"]["podManagementPolicy"] == "Parallel"
    trainer = pod(overlay, "trainer")["spec"]
    assert trainer["hostname"] == trainer["subdomain"] == "trainer"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_jobs_end_with_their_run_and_go_on_after_a_failure_but_not_of_configuration(overlay):
    assert set(of_kind(overlay, "Job")) == {"trainer", "client"}
    for job in of_kind(overlay, "Job").values():
        spec = job["spec"]
        first, second = spec["podFailurePolicy"]["rules"]
        assert first == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
        assert second["action"] == "Ignore" and second["onPodConditions"][0]["type"] == "DisruptionTarget"
        assert spec["template"]["spec"]["restartPolicy"] == "Never", "the only one that podFailurePolicy allows"
        assert spec["podReplacementPolicy"] == "Failed" and spec["backoffLimit"] > 6
    (state,) = (each for each in pod(overlay, "trainer")["spec"]["volumes"] if each["name"] == "state")
    claim = objects(overlay)["PersistentVolumeClaim", state["persistentVolumeClaim"]["claimName"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_pods_are_bounded_and_unprivileged_and_those_of_services_probed(overlay, name):
    spec, only = pod(overlay, name)["spec"], container(overlay, name)
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = only["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    unconfined = {"type": "Unconfined"} if name == "reward" else None
    assert own.get("seccompProfile") == own.get("appArmorProfile") == unconfined, "only the sandbox needs it"
    assert "memory" in only["resources"]["limits"]
    (spread,) = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert spread["podAffinityTerm"]["matchLabelKeys"] == [COMPONENT]
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    probes = {kind: only[kind]["exec"]["command"] for kind in only if kind.endswith("Probe")}
    if name == "client":
        assert not probes
        return
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert all(only[kind]["timeoutSeconds"] > 5 for kind in probes), "longer than the probe's own limit"
    assert probes["livenessProbe"][-1] == probes["readinessProbe"][-1] + " --live"


def test_the_probe_of_the_manifests_asks_the_service_of_its_pod(tmp_path):
    """Its shell command, with the variable that the pod's label gives; nobody serves."""
    *shell, text = container("cpu", "broker")["readinessProbe"]["exec"]["command"]
    (variable,) = (each for each in container("cpu", "broker")["env"] if each["name"] == "COMPONENT")
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{COMPONENT}']"
    (tmp_path / "run.toml").write_text('[addresses]\nbroker = "127.0.0.1:1"\n')
    environment = {**os.environ, "COMPONENT": "broker", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [*shell, text.replace("/etc/quartet/run.toml", str(tmp_path / "run.toml"))]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout) == (1, "") and answer.stderr.startswith("probe: "), answer


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_needs_is_in_the_overlay_or_its_command_is_in_the_docs(overlay):
    for name in COMPONENTS:
        for volume in pod(overlay, name)["spec"]["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects(overlay)
            elif "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in objects(overlay)
            elif volume["name"] == "pki":
                assert volume["secret"]["secretName"] == f"quartet-{name}-tls"
            elif "secret" in volume:
                assert f"kubectl create secret generic {volume['secret']['secretName']} " in DOCS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_image_has_a_dockerfile_and_gpu_images_a_gpu(overlay):
    for name in COMPONENTS:
        image, _, tag = container(overlay, name)["image"].partition(":")
        assert (ROOT / "deploy" / "containers" / f"{image.removeprefix('quartet-')}.Dockerfile").is_file()
        on_gpu = overlay == "gpu" and name in ("rollout", "trainer")
        assert tag == (f"{__version__}-gpu" if on_gpu else __version__)
        assert container(overlay, name)["resources"]["limits"].get("nvidia.com/gpu") == ("1" if on_gpu else None)


def selects(selector: dict[str, Any], component: str) -> bool:
    """Whether a podSelector selects the pods of a component."""
    labels = {} if component == "stranger" else {COMPONENT: component, PART: "quartet"}
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )


def allowed(overlay: str, direction: str, here: str, there: str, port: str) -> bool:
    """Whether policies let `here` be called by (Ingress), or call (Egress), `there` at a port of the callee."""
    peers = "from" if direction == "Ingress" else "to"
    policies = [each["spec"] for each in of_kind(overlay, "NetworkPolicy").values()]
    for policy in policies:
        if direction in policy["policyTypes"] and selects(policy["podSelector"], here):
            for rule in policy.get(direction.lower(), ()):
                of_port = "ports" not in rule or any(each["port"] == port for each in rule["ports"])
                if of_port and any(
                    "podSelector" in each and selects(each["podSelector"], there) for each in rule[peers]
                ):
                    return True
    return False


def callers(kind: str) -> set[str]:
    """Return the roles that may call any RPC of a service."""
    module = importlib.import_module(f"quartet.v1.{kind}_pb2")
    service = module.DESCRIPTOR.services_by_name[f"{kind.capitalize()}Service"]
    roles = {role for each in service.methods for role in allowed_roles(f"/{service.full_name}/{each.name}")}
    return roles & set(COMPONENTS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policies_allow_the_calls_of_roles_weights_and_agents_and_nothing_else(overlay):
    default = objects(overlay)["NetworkPolicy", "quartet-default-deny"]["spec"]
    assert default == {"podSelector": {"matchLabels": {PART: "quartet"}}, "policyTypes": ["Ingress", "Egress"]}
    wanted = {(role, kind, "grpc") for kind in SERVERS for role in callers(kind)}
    wanted |= {(a, b, port) for a in ("rollout", "trainer") for b in ("rollout", "trainer") for port in ("grpc", "any")}
    wanted |= {("environment", "rollout", "endpoint"), ("rollout", "rollout", "endpoint")}
    wanted |= {("trainer", "rollout", "endpoint")}  # of any port
    wanted |= {(caller, callee, "metrics") for caller, callee, port in wanted if port == "any"}
    if overlay != "external-redis":
        wanted.add(("broker", "redis", "redis"))
    found = {
        (caller, callee, port)
        for caller in CALLERS
        for callee in (*COMPONENTS, "redis")
        for port in ("grpc", "metrics", "any", *(["endpoint"] if callee == "rollout" else []), "redis")
        if allowed(overlay, "Ingress", callee, caller, port) and allowed(overlay, "Egress", caller, callee, port)
    }
    assert {flow for flow in found if flow[2] != "redis" or flow[1] == "redis"} == wanted


def test_the_pod_monitor_gives_the_labels_that_the_alerts_use():
    monitor = objects("gpu")["PodMonitor", "quartet"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    relabeled = [each["targetLabel"] for each in endpoint["relabelings"]]
    assert relabeled == ["job", "service", "instance", "instance"]
    assert selects(monitor["selector"], "broker")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and secrets by the commands of docs/kubernetes.md; kubectl only prints what it would create."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "kubectl").write_text(
        f'#!/bin/sh\nexec {shutil.which("kubectl")} "$@" --dry-run=client -o json > "$4.json"\n'
    )
    (folder / "kubectl").chmod(0o755)
    (commands,) = re.findall(r"```sh\n(quartet certs .*?)```", DOCS, re.DOTALL)
    client = ROOT / ".quartet" / "envs" / "client" / "bin"
    environment = {**os.environ, "PATH": f"{folder}:{client}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", commands]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return folder


@pytest.mark.parametrize("service", SERVERS)
def test_the_run_file_passes_the_services_dry_run(service, keys, model, tmp_path):  # noqa: F811
    """With what a pod has at its paths; Redis, and that the trainer's name is of this host, are the cluster's."""
    section = load_config(service, AnySection, RUN_FILE).security
    assert section == SecuritySection(**{key: f"/etc/quartet/pki/{name}" for key, name in FILES.items()})
    address = container("cpu", service).get("args", ["", ""])[1].replace("$(POD_NAME)", "rollout-1")
    there = [
        *(f"security.{key}={keys / 'keys' / service / name}" for key, name in FILES.items()),
        *(["addresses.rollout=" + address.partition("=")[2]] if address else []),
        f"model.path={model}",
        "run.sampling.max_new_tokens=32",  # as the context of that model
        f"run.folder={tmp_path}",
        "trainer.weights.store_host=127.0.0.1",
    ]
    program = ROOT / ".quartet" / "envs" / service / "bin" / f"quartet-{service}"
    command = [program, RUN_FILE, "--dry-run", *(["--section-only"] if service == "broker" else [])]
    command += [word for each in there for word in ("--set", each)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)
    assert plan["service"] == service and plan["warnings"] == []


def test_the_run_file_passes_the_clients_dry_run():
    arguments = container("cpu", "client")["args"]
    assert arguments[:4] == ["run", "/etc/quartet/run.toml", "--attach", "--plain"]
    data = f"data.train={KUBERNETES / 'base' / 'train.jsonl'}"
    command = [ROOT / ".quartet" / "envs" / "client" / "bin" / "quartet", "run", RUN_FILE, "--attach", "--dry-run"]
    answer = subprocess.run([*command, "--set", data], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["data"]["prompt_instances"] >= 100 * 4, "as many as its steps take"


def test_secrets_are_those_that_pods_mount(keys):
    for name in COMPONENTS:
        secret = json.loads((keys / f"quartet-{name}-tls.json").read_text())
        assert secret["metadata"]["name"] == f"quartet-{name}-tls" and set(secret["data"]) == set(EXPORTED)
