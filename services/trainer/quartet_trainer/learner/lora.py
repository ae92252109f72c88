"""A LoRA adapter of a model: W = W0 + B A alpha / r, of which only A and B are trained (arXiv:2106.09685).

Tensors are named as in PEFT's files. Inside the model, their names also contain the adapter's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from colossalai.booster import Booster
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_common.model_folder import folder_checksum
from quartet_common.weights import LORA_PREFIX
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.model import shapes_in_files
from quartet_trainer.learner_settings import LoraSection

BASE_FILE = "base.json"
_NAME = "default"


class Adapter:
    """The adapters of a model. Creating it adds them to the model, with B = 0, and freezes all other parameters."""

    def __init__(self, booster: Booster, causal_lm: PreTrainedModel, settings: LoraSection, seed: int) -> None:
        """Add the adapters.

        Args:
            booster: of a plugin that can train adapters.
            causal_lm: changed in place.
            settings: rank, scale, and target modules.
            seed: of A's initial values.

        Raises:
            LearnerError: the model has no linear layer of a name in `settings.target_modules`, or experts of that name.
        """
        head = causal_lm.get_output_embeddings()
        linear = {
            name.rpartition(".")[2]
            for name, module in causal_lm.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        if settings.target_modules == "all-linear":
            settings = settings.model_copy(update={"target_modules": sorted(linear)})
        self.settings = settings
        """Those given, with the names of the layers as `target_modules`."""
        for target in settings.target_modules:
            if target not in linear:
                raise LearnerError(
                    f"trainer.lora.target_modules: the model has no inner linear layer {target!r}; "
                    f"it has {', '.join(sorted(linear))}"
                )
        check_targets(causal_lm, settings.target_modules)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.r,
            lora_alpha=settings.alpha,
            use_rslora=settings.use_rslora,
            lora_dropout=0.0,
            target_modules=settings.target_modules,
        )
        self._causal_lm = causal_lm
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft = booster.enable_lora(causal_lm, lora_config=config)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of every target module, under PEFT's names."""
        for name, parameter in self._causal_lm.named_parameters():
            if parameter.requires_grad:
                yield LORA_PREFIX + name.replace(f".{_NAME}.", "."), parameter

    def disabled(self) -> AbstractContextManager:
        """A context in which the model computes without its adapters."""
        return self._peft.disable_adapter()

    def model_parameters(self) -> Iterator[tuple[str, nn.Parameter, LoraLayer | None]]:
        """This rank's parameters of the model itself, under its own names, each with its adapter's layer or None."""
        layers = {name: m for name, m in self._causal_lm.named_modules() if isinstance(m, LoraLayer)}
        for name, parameter in self._causal_lm.named_parameters():
            if ".lora_" in name:
                continue
            layer, _, kind = name.partition(".base_layer.")
            yield f"{layer}.{kind}" if kind else name, parameter, layers[layer] if kind == "weight" else None

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model's tensors under their own names, with each adapter added to its matrix."""
        for name, parameter, layer in self.model_parameters():
            yield name, merge(parameter, layer)


def check_targets(causal_lm: PreTrainedModel, targets: Iterable[str]) -> None:
    """Raise LearnerError if rollouts, which expect an adapter of each matrix of a target's name in the model's files,
    would expect others than those of linear layers: transformers stacks experts, and PEFT adds none to stacks."""
    files = shapes_in_files(causal_lm, {name: tensor.shape for name, tensor in causal_lm.state_dict().items()})
    for target in targets:
        end = f".{target}.weight"
        expected = {name for name, shape in files.items() if name.endswith(end) and len(shape) == 2}
        layers = {f"{name}.weight" for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)}
        if other := expected ^ {name for name in layers if name.endswith(end)}:
            raise LearnerError(
                f"trainer.lora.target_modules: {target!r} is also a name of matrices that the model has stacked or "
                f"renamed, as {min(other)}, to which no adapter can be added; leave {target!r} out"
            )


def merge(parameter: nn.Parameter, layer: LoraLayer | None) -> Tensor:
    """A parameter of `Adapter.model_parameters` with its adapter added, if it has one."""
    tensor = parameter.detach()
    return tensor if layer is None else tensor + layer.get_delta_weight(_NAME).detach()


def write_adapter_files(folder: Path, settings: LoraSection, base: Path, checksum: int) -> None:
    """Write an adapter folder's files beside the tensors: PEFT's configuration, and which base model it belongs to."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.use_rslora,
        "lora_dropout": 0.0,
        "target_modules": settings.target_modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    of = {"path": str(base.absolute()), "checksum": f"{checksum:016x}"}
    (folder / BASE_FILE).write_text(json.dumps(of, indent=2) + "\n", encoding="utf-8")


def check_base(folder: Path, model_path: Path) -> None:
    """Raise LearnerError if the adapter in `folder` was trained on other weights than those of `model_path`."""
    if not (folder / BASE_FILE).exists():
        return  # another program wrote it
    base = json.loads((folder / BASE_FILE).read_text(encoding="utf-8"))
    if (found := f"{folder_checksum(model_path):016x}") != base["checksum"]:
        raise LearnerError(
            f"{folder} is an adapter of the model that was at {base['path']}, checksum {base['checksum']}; "
            f"{model_path} has {found}"
        )
