"""Rounds the float32 weights of a checkpoint to the dtype in its config.json, in which the run publishes them."""

import json
import shutil
from pathlib import Path

from quartet_client.errors import InputError
from quartet_common.model_folder import read_model_folder, read_safetensors_header
from quartet_common.python_file import install_command

_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ARRAYS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHUNK = 64 << 20


def rounding_of(model: Path) -> tuple[str, str] | None:
    """Return the types of the weights, in the files and in config.json; None unless all files have one, wider type."""
    config = read_model_folder(model, "FOLDER", weights=False)
    if (code := _CODES.get(config.get("dtype") or config.get("torch_dtype") or "")) is None:
        return None
    headers = [read_safetensors_header(file, "FOLDER") for file in model.glob("*.safetensors")]
    held = {tensor["dtype"] for header in headers for tensor in header.values()}
    wider = len(held) == 1 and held <= {"F32", "F64"} and _ARRAYS[min(held)][-1] > _ARRAYS[code][-1]
    return (held.pop(), code) if wider else None


def copy_rounded(source: str, target: str, rounding: tuple[str, str] | None) -> None:
    """Copy a file of a model folder; round weights to the nearest, as torch does. Raises InputError without numpy."""
    if rounding is None or not source.endswith(".safetensors"):
        shutil.copy2(source, target)
        return
    try:
        import numpy as np
    except ModuleNotFoundError as error:
        raise InputError(f"quartet export needs numpy for this checkpoint: {install_command('numpy')}") from error
    held, code = rounding
    ratio = int(_ARRAYS[held][-1]) // int(_ARRAYS[code][-1])
    header = {
        name: {**tensor, "dtype": code, "data_offsets": [offset // ratio for offset in tensor["data_offsets"]]}
        for name, tensor in read_safetensors_header(Path(source)).items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with Path(source).open("rb") as read, Path(target).open("xb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        read.seek(8 + int.from_bytes(read.read(8), "little"))
        while data := read.read(_CHUNK):
            values = np.frombuffer(data, _ARRAYS[held]).astype("<f4")
            if code == "BF16":  # the upper half, rounded to the nearest, and to the even one of two as near
                bits = values.view("<u4")
                values = np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
            written.write(values.astype(_ARRAYS[code]).tobytes())
