"""Builds what a release consists of into a folder, `dist` by default:

    an sdist of each package, and the wheel that is built from it
    quartet-SERVICE.cdx.json   a CycloneDX SBOM of the service's pinned closure; quartet-SERVICE-gpu.cdx.json for CUDA
    SHA256SUMS

    python deploy/release.py [FOLDER]

It refuses a folder that is not empty. Packages of a checkout with changes are called .dirty (`quartet_common.build`).
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from quartet_common.build import read_build

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ("broker", "reward", "environment", "rollout", "trainer")


def build_packages(folder: Path) -> None:
    """Build sdists and wheels. Raises subprocess.CalledProcessError."""
    uv = ROOT / ".quartet" / "tools" / "bin" / "uv"
    for package in ("client", *(f"services/{service}" for service in SERVICES)):
        subprocess.run(
            [uv, "build", "--quiet", "--no-create-gitignore", "--out-dir", folder, ROOT / package], check=True
        )


def write_sbom(closure: Path, file: Path) -> None:
    """Write the SBOM of a file of pinned requirements. Raises subprocess.CalledProcessError."""
    program = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([program, "requirements", "--output-reproducible", "-o", file, closure], check=True)


def build(folder: Path) -> None:
    """Build all of it. Raises subprocess.CalledProcessError."""
    build_packages(folder)
    write_sbom(ROOT / "client" / "requirements.txt", folder / "quartet-client.cdx.json")
    for service in SERVICES:
        for kind in ("", "-gpu"):
            closure = ROOT / "services" / service / f"requirements{kind}.txt"
            if closure.exists():
                write_sbom(closure, folder / f"quartet-{service}{kind}.cdx.json")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))


def main() -> int:
    parser = argparse.ArgumentParser(description="Build packages, SBOMs and checksums of a release.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    folder = parser.parse_args().folder
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} has files; name an empty folder or remove it", file=sys.stderr)
        return 2
    try:
        build(folder)
    except subprocess.CalledProcessError as failure:
        return failure.returncode
    print(f"{read_build()} is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
