#!/usr/bin/env bash
# Makes the Python stubs from the protos. Usage: protos/generate.sh [PYTHON] [OUTPUT_FOLDER]
# PYTHON has grpcio-tools and mypy-protobuf (the development environment has), of pinned versions so that the stubs come
# out the same.
set -euo pipefail
cd "$(dirname "$0")"
python=${1:-../.quartet/envs/dev/bin/python}
output=${2:-python}
PATH="$(dirname "$(realpath -s "$python")"):$PATH" # of the plug-in protoc-gen-mypy_grpc
"$python" -m grpc_tools.protoc -I . --python_out="$output" --pyi_out="$output" --grpc_python_out="$output" \
    --mypy_grpc_out=quiet:"$output" quartet/v1/*.proto
