"""What is in a checkpoint.

```
step-00000012/
  model/                  Hugging Face folder, transformers-4.51 form, in the trained precision; tokenizer files copied
  optimizer.safetensors   AdamW's state: "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" for each parameter NAME
  learner.json            {"step", "settings", "state"}: state is the training loop's own
  manifest.json           written last: {"format", "step", "files": {name: bytes}} and the training loop's facts:
                          {"run_id", "run_created_at", "ledger"}; see `quartet_common.ledger`
```

There is no random state in it: training draws no random number (no dropout, batches come from the broker).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_common.checkpoints import read_manifest
from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.model_folder import copy_companions

FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def write_model(model: PreTrainedModel, folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder with the weights as `dtype`; all else is as in `source`, the folder of its origin."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state, safe_serialization=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_companions(source, folder)


def read_model(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of a folder that `write_model` wrote into `model`.

    Raises:
        LearnerError: names or shapes are another model's.
    """
    target = model.state_dict()
    missing = set(untied_names(model))
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open has no iterator
                tensor = weights.get_tensor(name)
                if name not in target or target[name].shape != tensor.shape:
                    raise LearnerError(f"{file} holds {name} {list(tensor.shape)}, which this model has not")
                with torch.no_grad():
                    target[name].copy_(tensor)
                missing.discard(name)
    if missing:
        raise LearnerError(f"{folder} lacks {len(missing)} of this model's tensors, {min(missing)} among them")


def untied_names(model: PreTrainedModel) -> list[str]:
    """Names of the state dict in order, each storage once: a tied `lm_head` is left out."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            names.append(name)
    return names


def write_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write AdamW's state by parameter name."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}/{name}"] = value.detach().cpu().contiguous()
    save_file(tensors, path)


def read_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Set AdamW's state to what `write_optimizer` wrote.

    Raises:
        LearnerError: the file has a state of something that is no parameter of this model.
    """
    tensors = load_file(path)
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        state = {moment: tensors.pop(f"{moment}/{name}") for moment in _MOMENTS if f"{moment}/{name}" in tensors}
        if state:
            # AdamW keeps its step count beside the parameter when it is fused.
            optimizer.state[parameter] = {moment: value.to(parameter.device) for moment, value in state.items()}
    if tensors:
        raise LearnerError(f"{path} has the state of {min(tensors)}, which this model has not")


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
