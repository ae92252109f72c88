#!/usr/bin/env bash
# Makes the Python stubs from the protos. Usage: protos/generate.sh [PYTHON] [OUTPUT_FOLDER]
# PYTHON has grpcio-tools (the development environment has); its version is pinned so that the stubs come out the same.
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-../.quartet/envs/dev/bin/python}
output=${2:-python}
"$python" -m grpc_tools.protoc -I . --python_out="$output" --pyi_out="$output" --grpc_python_out="$output" quartet/v1/*.proto
