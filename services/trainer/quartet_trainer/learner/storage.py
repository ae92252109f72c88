"""What is in a checkpoint.

```
step-00000012/
  model/                  Hugging Face folder for transformers 4 and 5, in the trained precision; tokenizer files copied
  adapter/                in place of model/ with lora.r: PEFT's adapter folder, and base.json: {"path", "checksum"}
  optimizer.safetensors   AdamW's state: "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" for each parameter NAME
  critic.safetensors      with a critic only: "model/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME"
  value_head.safetensors  in its place with critic.form = "head": the head alone, in the same way
  learner.json            {"step", "settings", "state"}: state is the training loop's own
  manifest.json           written last: {"format", "step", "files": {name: bytes}} and the training loop's facts:
                          {"run_id", "run_created_at", "ledger"}; see `quartet_common.ledger`
```

Both hold whole tensors under Hugging Face's names, whatever the plugin: any plugin reads them, on any number of ranks.
There is no random state in it: training draws no random number (no dropout, batches come from the broker).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quartet_common.checkpoints import read_manifest
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.model_folder import copy_companions, for_any_transformers
from quartet_trainer.learner.names import is_converted, untied_names
from quartet_trainer.learner.plugins import Plugin

FORMAT = 1
FILE_BYTES = 4 << 30
"""Size at which a model folder's weights go on in another file."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def write_model(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, torch.Size],
    folder: Path,
    source: Path,
    dtype: torch.dtype,
) -> None:
    """Write a Hugging Face folder.

    Args:
        tensors: names and whole tensors, in the order of `specs`; a file is written as soon as it is full.
        specs: names and shapes of all of them.
        folder: where to; made here.
        source: the folder of the model's origin: all but the weights is as there.
        dtype: of the weights written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _files(specs, dtype.itemsize)
    weights = iter(tensors)
    for file, names in files.items():
        state: dict[str, Tensor] = {}
        for name in names:
            came, tensor = next(weights)
            if came != name:
                raise ValueError(f"the tensor {came} came where {name} was announced")
            state[name] = tensor.detach().to("cpu", dtype).contiguous()
        save_file(state, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        size = sum(math.prod(shape) for shape in specs.values()) * dtype.itemsize
        index = {
            "metadata": {"total_size": size},
            "weight_map": {n: file for file, names in files.items() for n in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = for_any_transformers(config, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_companions(source, folder)


def write_adapter(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write an adapter's tensors by PEFT's names; `adapter.write_adapter_files` writes the rest of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _files(specs: Mapping[str, torch.Size], itemsize: int) -> dict[str, list[str]]:
    """The names in each file of a model folder, none much above `FILE_BYTES`."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, shape in specs.items():
        bytes_ = math.prod(shape) * itemsize
        if parts[-1] and size + bytes_ > FILE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, start=1)}


def read_model(plugin: Plugin, folder: Path) -> None:
    """Copy the weights of a folder that `write_model` wrote, under whatever plugin, into this rank's part of the model.

    Raises:
        LearnerError: names or shapes are another model's.
    """
    held = {name for name, _ in plugin.parameters()}
    missing = set(plugin.specs)
    for name, shape, read in _saved(plugin, folder):
        if list(plugin.specs.get(name, ())) != shape:
            raise LearnerError(f"{folder} holds {name} {shape}, which this model has not")
        missing.discard(name)
        if name in held:
            plugin.assign(name, read())
    if missing:
        raise LearnerError(f"{folder} lacks {len(missing)} of this model's tensors, {min(missing)} among them")


def _saved(plugin: Plugin, folder: Path) -> Iterator[tuple[str, list[int], Callable[[], Tensor]]]:
    """Names and shapes of a folder's tensors, and what reads each."""
    if plugin.adapter is None and is_converted(plugin.causal_lm):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=plugin.dtype, local_files_only=True)
        state = model.state_dict()
        yield from ((name, list(state[name].shape), state[name].clone) for name in untied_names(model))
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open has no iterator
                yield name, weights.get_slice(name).get_shape(), partial(weights.get_tensor, name)


def write_optimizer(moments: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write AdamW's state, `Plugin.moments`."""
    save_file({key: value.cpu().contiguous() for key, value in moments}, path)


def read_optimizer(plugin: Plugin, path: Path) -> None:
    """Set this rank's part of AdamW's state to what `write_optimizer` wrote, under whatever plugin.

    Raises:
        LearnerError: the file has a state of something that is no parameter of this model.
    """
    state = plugin.optimizer.unwrap().state
    state.clear()
    with safe_open(path, framework="pt") as moments:
        keys = set(moments.keys())
        strange = {key for key in keys if key.partition("/")[2] not in plugin.specs}
        if strange:
            raise LearnerError(f"{path} has the state of {min(strange)}, which this model has not")
        for name, parameter in plugin.parameters():
            found = {
                moment: moments.get_tensor(f"{moment}/{name}") for moment in _MOMENTS if f"{moment}/{name}" in keys
            }
            if found:
                key = plugin.trained(parameter)
                state[key] = {
                    # AdamW keeps its step count beside the parameter when it is fused.
                    moment: value.to(key.device)
                    if value.ndim == 0
                    else plugin.piece(name, value).to(key.device, key.dtype).contiguous()
                    for moment, value in found.items()
                }


def write_learner(path: Path, step: int, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the part that is not tensors."""
    path.write_text(json.dumps({"step": step, "settings": settings, "state": state}, indent=1), encoding="utf-8")


def read_learner(folder: Path) -> dict[str, Any]:
    """Read `learner.json` of a checkpoint after checking that the checkpoint is complete.

    Raises:
        LearnerError: it is not, or of another format.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise LearnerError(f"{folder} is no complete checkpoint")
    if manifest.get("format") != FORMAT:
        raise LearnerError(f"{folder} has checkpoint format {manifest.get('format')}; this trainer reads {FORMAT}")
    return json.loads((folder / "learner.json").read_text(encoding="utf-8"))
