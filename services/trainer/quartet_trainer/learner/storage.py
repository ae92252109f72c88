"""What is in a checkpoint.

```
step-00000012/
  model/                  Hugging Face folder for transformers 4 and 5: weights in the trained precision, config.json
                          with the dtype in which they are published; tokenizer files copied
  adapter/                in place of model/ with lora.r: PEFT's adapter folder, and base.json: {"path", "checksum"}
  reference/              the reference model, like model/, once it has taken the policy's weights
  optimizer.safetensors   AdamW's state: "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" for each parameter NAME
  critic.safetensors      with a critic only: "model/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME"
  value_head.safetensors  in its place with critic.form = "head": the head alone, in the same way
  manifest.json           written last: {"format", "step", "settings", "coefficients", "files": {name: bytes}} and the
                          training loop's facts: {"run_id", "run_created_at", "ledger"}; see `quartet_common.ledger`
```

Each of N ranks writes a file of the weights and one of AdamW's state, NAME-IIIII-of-NNNNN.safetensors, into a folder on
a shared file system. Both hold whole tensors under Hugging Face's names, whatever the plugin: any plugin reads them, on
any number of ranks. There is no random state: training draws no random numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
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
from quartet_trainer.learner.checks import copy_companions, for_any_transformers
from quartet_trainer.learner.distributed import in_turn
from quartet_trainer.learner.model import is_converted, untied_names
from quartet_trainer.learner.plugins import Plugin

FORMAT = 1
FILE_BYTES = 4 << 30
"""Maximum size of one file of a model folder's weights."""


def write_model(
    tensors: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, torch.Size],
    folder: Path,
    source: Path,
    dtype: torch.dtype,
    exact: Container[str] = (),
) -> None:
    """Write a Hugging Face folder.

    Args:
        tensors: names and whole tensors, in the order of `specs`; a file is written once its tensors have arrived.
        specs: names and shapes of all tensors.
        folder: created if it does not exist.
        source: the model folder from which everything but the weights is copied.
        dtype: of the weights written.
        exact: names of those that are written as they are.
    """
    files = model_files(specs, dtype)
    write_weights(tensors, files, folder, dtype, exact)
    write_model_metadata(files, specs, folder, source, dtype)


def model_files(specs: Mapping[str, torch.Size], dtype: torch.dtype, least: int = 1) -> dict[str, list[str]]:
    """The names in each file of a model folder: `least` files, or more if one would be above `FILE_BYTES`."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in specs.items()}
    limit = min(FILE_BYTES, -(-sum(sizes.values()) // least))
    parts: list[list[str]] = [[]]
    size = 0
    for name, bytes_ in sizes.items():
        if parts[-1] and size + bytes_ > limit and (limit == FILE_BYTES or len(parts) < least):
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += bytes_
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, start=1)}


def write_weights(
    tensors: Iterable[tuple[str, Tensor]],
    files: Mapping[str, list[str]],
    folder: Path,
    dtype: torch.dtype,
    exact: Container[str] = (),
) -> None:
    """Write `files` from tensors that arrive in their order, each file once its tensors are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = iter(tensors)
    for file, names in files.items():
        state: dict[str, Tensor] = {}
        for name in names:
            given, tensor = next(weights)
            if given != name:
                raise ValueError(f"expected tensor {name}, got {given}")
            state[name] = tensor.detach().to("cpu", tensor.dtype if name in exact else dtype).contiguous()
        save_file(state, folder / file, metadata={"format": "pt"})


def write_model_metadata(
    files: Mapping[str, list[str]], specs: Mapping[str, torch.Size], folder: Path, source: Path, dtype: torch.dtype
) -> None:
    """Write everything of a model folder but the weights: their index, config.json and the tokenizer's files.

    `dtype`: for config.json: what programs that load the folder make of the weights in the files.
    """
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
    """Write an adapter's tensors under PEFT's names; `lora.write_adapter_files` writes the rest of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def read_model(plugin: Plugin, folder: Path, *, foreign: bool = False) -> None:
    """Copy the weights of a Hugging Face or adapter folder into this rank's part of the model.

    Files are memory-mapped, which the ranks of a host share, and read tensor by tensor. If transformers has to convert
    the files' tensors, it loads the whole model, on the ranks of a host one after another.

    Args:
        foreign: another program may have written the folder, with more tensors, or other names that transformers maps.

    Raises:
        LearnerError: names or shapes are another model's.
    """
    held = {name for name, _ in plugin.parameters()}
    specs = plugin.specs if plugin.adapter else plugin.model_specs
    missing = set(specs)
    for name, shape, read in _saved(plugin, folder, specs.keys() if foreign else frozenset()):
        if foreign and name not in specs:
            continue
        if list(specs.get(name, ())) != shape:
            raise LearnerError(f"{folder} holds {name} {shape}, which this model has not")
        missing.discard(name)
        if name in plugin.buffers:
            plugin.buffers[name].copy_(read())
        elif name in held:
            plugin.assign(name, read())
    if missing:
        raise LearnerError(f"{folder} lacks {len(missing)} of this model's tensors, {min(missing)} among them")


def _saved(plugin: Plugin, folder: Path, wanted: Set[str]) -> Iterator[tuple[str, list[int], Callable[[], Tensor]]]:
    """The name, shape and reader of each tensor in a folder; mapped by transformers if not all `wanted` are in it."""
    files = sorted(folder.glob("*.safetensors"))
    converted = plugin.adapter is None and is_converted(plugin.causal_lm)
    if converted or not wanted <= _names(files):
        with in_turn(plugin.ranks):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=plugin.dtype, local_files_only=True)
            state = model.state_dict()
            yield from ((name, list(state[name].shape), state[name].clone) for name in untied_names(model))
        return
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open has no iterator
                yield name, weights.get_slice(name).get_shape(), partial(weights.get_tensor, name)


def _names(files: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as weights:
            names.update(weights.keys())
    return names


def write_optimizer(moments: Iterable[tuple[str, Tensor]], folder: Path, rank: int, ranks: int) -> None:
    """Write a rank's share of AdamW's state, `Plugin.moments`."""
    of_rank = f"-{rank + 1:05d}-of-{ranks:05d}" if ranks > 1 else ""
    save_file({key: value.cpu().contiguous() for key, value in moments}, folder / f"optimizer{of_rank}.safetensors")


def read_optimizer(plugin: Plugin, folder: Path) -> None:
    """Set this rank's part of AdamW's state to what `write_optimizer` wrote, under whatever plugin and by any ranks.

    Raises:
        LearnerError: there is no file, or one has the state of a parameter that this model does not have.
    """
    state = plugin.optimizer.unwrap().state
    state.clear()
    held = dict(plugin.parameters())
    files = sorted(folder.glob("optimizer*.safetensors"))
    if not files:
        raise LearnerError(f"{folder} is no complete checkpoint")
    for file in files:
        with safe_open(file, framework="pt") as moments:
            for key in moments.keys():  # noqa: SIM118 - safe_open has no iterator
                moment, _, name = key.partition("/")
                if name not in plugin.specs:
                    raise LearnerError(f"{file} has the state of {key}, which this model has not")
                if name not in held or name in plugin.frozen:
                    continue
                of, value = plugin.trained(held[name]), moments.get_tensor(key)
                # Fused AdamW needs its step count on the parameter's device.
                own = value if value.ndim == 0 else plugin.piece(name, value).to(of.dtype).contiguous()
                state.setdefault(of, {})[moment] = own.to(of.device)


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest.

    Raises:
        LearnerError: the checkpoint is incomplete or of another format.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise LearnerError(f"{folder} is no complete checkpoint")
    if manifest.get("format") != FORMAT:
        raise LearnerError(f"{folder} has checkpoint format {manifest.get('format')}; this trainer reads {FORMAT}")
    return manifest
