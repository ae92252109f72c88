"""TorchFSDPPlugin: every rank holds a part of each tensor, and gathers a layer while it is in use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import PreTrainedModel

from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.distributed import Ranks, in_turn
from quartet_trainer.learner.model import Policy
from quartet_trainer.learner.plugins.base import CreateOptimizer
from quartet_trainer.learner.plugins.ranged import Ranged
from quartet_trainer.learner_settings import LearnerSettings


class _Shell(nn.Module):
    """An outermost module without parameters.

    FSDP keeps the outermost module's parameters gathered after a forward pass, for the backward pass. After a pass
    without gradient they would stay in memory, and be out of date once the weights change.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(*inputs)


class TorchFsdp(Ranged):
    """Each decoder layer is an FSDP unit; embedding, last norm and head together are another.

    A unit's tensors are flattened, concatenated and divided evenly among the ranks.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        precision = None
        if settings.precision == "bf16":
            # Weights are float32, gathered as bf16; inputs such as temperatures are not cast.
            precision = MixedPrecision(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            )
        fsdp = TorchFSDPPlugin(mixed_precision=precision)
        fsdp.fsdp_kwargs["use_orig_params"] = True  # keeps parameters' names; the plugin has no argument for it
        super().__init__(settings, ranks, Booster(plugin=fsdp))
        self._fsdp = fsdp

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        policy = self._policy(causal_lm)
        self.causal_lm = causal_lm
        self._held = dict(causal_lm.named_parameters())
        self._fsdp.fsdp_kwargs["auto_wrap_policy"] = ModuleWrapPolicy({Policy, *decoder_layers(causal_lm)})
        optimizer = create_optimizer(policy)
        # Given the optimizer, the plugin would recreate it with one group and a default that torch's AdamW refuses.
        # There is no need: FSDP keeps the parameter objects.
        self.model, *_ = self.booster.boost(_Shell(policy))
        self.optimizer = FSDPOptimizerWrapper(optimizer, self.model)
        self._share_ranges({name: parameter.numel() for name, parameter in self._held.items()})

    def keep_reference(self, load: Callable[[], PreTrainedModel], *, other: bool = False) -> None:
        """See `Plugin`. The reference is spread like the policy."""
        with in_turn(self.ranks):
            self._reference, *_ = self.booster.boost(_Shell(Policy(load().eval().requires_grad_(False))))

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._held.values() if parameter.grad is not None]

    def _weight(self, name: str) -> Tensor:
        return self._held[name].detach()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return whole if self.data_size == 1 else super().piece(name, whole)  # FSDP flattens nothing on a single rank


def decoder_layers(causal_lm: PreTrainedModel) -> set[type[nn.Module]]:
    """The classes in a model's `_no_split_modules`.

    Raises:
        LearnerError: the model has no module of such a class.
    """
    named = set(causal_lm._no_split_modules or ())
    classes = {type(module) for module in causal_lm.modules() if type(module).__name__ in named}
    if not classes:
        raise LearnerError(
            f"plugin 'torch_fsdp' cannot find the layers of a {causal_lm.config.model_type!r} model: "
            f"it has none of {sorted(named)}; use plugin 'torch_ddp' or 'low_level_zero'"
        )
    return classes
