"""A live run whose services install.sh installs and exchanges, on a host with a stand-in for systemd."""

import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from another_build import ROOT, Build
from live_run import LiveRun

sys.path.append(str(ROOT / "tests" / "deploy"))
from host import Host, plug_in, why_not  # noqa: E402, F401 (beside the other suite's)


class InstalledRun(LiveRun):
    """`folder` can be entered by any user. `installed`: the kinds of services that install.sh installs."""

    def __init__(self, folder: Path, model: Path, pythons: Mapping[str, Path], installed: Collection[str]):
        # Installations compete with the run for the processors.
        pace = shutil.copy(ROOT / "tests" / "preloaded" / "pace.py", folder)
        settings = {"trainer.callbacks": f'["{pace}:Pace"]', "run.sampling.max_new_tokens": 4}
        super().__init__(folder, model, pythons, settings=settings)
        self.installed = installed
        self.host = Host(folder, self.processes, disk="trainer" in installed, users=600)
        self.plug_ins = {kind: plug_in(folder / f"plug-in-{kind}", kind) for kind in installed}
        for file in model.iterdir():
            file.chmod(0o644)
        (folder / "run").mkdir()
        (folder / "run").chmod(0o777)
        self.host.give_tools()
        self.host.path("/etc/quartet").mkdir()
        run_file, *options = self.arguments
        assert not any(" " in word for word in options)
        for kind in installed:
            self.host.path(f"/etc/quartet/{kind}.toml").write_text(Path(run_file).read_text())
            self.host.path(f"/etc/quartet/{kind}.env").write_text(f"QUARTET_OPTIONS={' '.join(options)}\n")

    def start(self, kind: str, build: Build | None = None) -> None:
        """Start a service from a build; install it if it is one of `installed`."""
        if kind not in self.installed:
            return super().start(kind, build)
        done = self.install(kind, build)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, kind: str, build: Build, *options: object) -> subprocess.CompletedProcess[str]:
        """Run a build's install.sh."""
        # The broker starts quickly without bytecode, too.
        variables = {"UV_COMPILE_BYTECODE": "0"} if kind == "broker" else {}
        return self.host.install(kind, *options, checkout=build.folder, **variables)

    def refused(self, kind: str, build: Build) -> str:
        """Have an upgrade refused because of the configuration; return its error. The service must not change."""
        file = self.host.path(f"/etc/quartet/{kind}.toml")
        text, before = file.read_text(), (self.host.release(kind), self.processes[kind])
        file.write_text(f"{text}\n[nonsense]\n")
        done = self.host.install(kind, checkout=build.folder, UV_COMPILE_BYTECODE="0")
        file.write_text(text)
        assert done.returncode == 2 and before == (self.host.release(kind), self.processes[kind]), done
        return done.stderr

    def has_plug_in(self, kind: str) -> bool:
        """Whether the release that a service runs has the plug-in."""
        python = Path(f"/proc/{self.processes[kind].pid}/cmdline").read_text().split("\0")[0]
        return bool(list(self.host.path(str(Path(python).parents[1])).glob("lib/*/site-packages/plug_in.py")))

    def close(self) -> None:
        self.host.close()
        super().close()
