"""A sharded causal language model that computes log-probs of chosen tokens, whole or as one stage of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import Tensor
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.attention import trunk
from quartet_trainer.learner.model import after_output_layer, in_chunks
from quartet_trainer.learner.plugins.sequence import SequenceParallel


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probs of t tokens and the entropy of their distributions. All ranks of `group` call.

    Args:
        logits: float32 or float64 [t, v]: this rank's v columns.
        targets: int64 [t].
        first: the token of this rank's first column.
        group: the tensor-parallel ranks.

    Returns:
        log_probs [t] and entropy [t], in nats, the same on every rank, both with gradient.
    """
    return _VocabParallel.apply(logits, targets - first, group)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        greatest = logits.max(dim=-1).values
        _reduce(greatest, dist.ReduceOp.MAX, group)
        shifted = logits - greatest[:, None]
        exponentials = shifted.exp()
        mine = (targets >= 0) & (targets < logits.shape[-1])
        column = torch.where(mine, targets, 0)[:, None]
        chosen = torch.where(mine, shifted.gather(-1, column).squeeze(-1), 0.0)
        sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), chosen])
        _reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), column, mine, entropy)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, column, mine, entropy = ctx.saved_tensors
        gradient = torch.zeros_like(probabilities)
        if grad_log_probs is not None:
            gradient -= probabilities * grad_log_probs[:, None]
            gradient.scatter_add_(-1, column, (grad_log_probs * mine)[:, None])
        if grad_entropy is not None:
            # xlogy: 0 where the probability is 0.
            own = torch.special.xlogy(probabilities, probabilities)
            gradient -= (own + probabilities * entropy[:, None]) * grad_entropy[:, None]
        return gradient, None, None


def _reduce(values: Tensor, operation: dist.ReduceOp, group: dist.ProcessGroup) -> None:
    if values.numel():
        dist.all_reduce(values, op=operation, group=group)


class Stage:
    """Replaces the forward of a causal language model that `ShardingPolicy` has sharded.

    The model's own forward would compute the logits of all positions. This one runs the base model's own forward, and
    applies the output layer to the chosen tokens only, a chunk at a time. In a stage, layers of other stages return
    their input, except the layer before the stage's first, which returns the hidden states that the previous stage
    sent. So masks, rotary embeddings, windows and everything else outside the layers is the family's own code.

    A whole model is called with `MicroBatch.inputs` and returns log-probs and entropy. A stage is called by
    ColossalAI's schedule with the index of a micro-batch, which it loads itself, and the previous stage's hidden
    states; it returns hidden states, or in the last stage {"log_probs", "entropy"}.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        stages: PipelineStageManager | None,
        tp_group: dist.ProcessGroup,
        sequence: SequenceParallel | None,
    ) -> None:
        """Replace the model's `forward`.

        Args:
            causal_lm: the sharded model.
            stages: this stage's place in the pipeline; None without one.
            tp_group: the ranks that share its matrices.
            sequence: its sequence parallelism, if any.
        """
        self.causal_lm = causal_lm
        self.micro_batch: MicroBatch
        """The micro-batch last loaded."""
        self._trunk = trunk(causal_lm)
        self._is_last = stages is None or stages.is_last_stage()
        self._tp_group = tp_group
        self._sequence = sequence
        self._load: Callable[[int], MicroBatch]
        self._received: Tensor | None = None
        self._seconds = 0.0
        if sequence:
            sequence.use(causal_lm)
        if stages:
            self._skip_other_layers(*stages.get_stage_index(stages.distribute_layers(len(self._trunk.layers))))
        causal_lm.forward = self._staged_forward if stages else self._whole_forward
        self._columns = causal_lm.lm_head.weight.shape[0] if self._is_last else 0

    def _skip_other_layers(self, start: int, end: int) -> None:
        """Make all layers but [start, end) return their input, and layer `start` - 1 what was received."""
        layers = self._trunk.layers
        for layer in (*layers[:start], *layers[end:], *(() if self._is_last else (self._trunk.norm,))):
            layer.forward = lambda hidden_states, *_, **__: hidden_states
        if start:
            layers[start - 1].forward = lambda *_, **__: self._received

    def begin(self, load: Callable[[int], MicroBatch]) -> None:
        """Set the function that loads the schedule's next micro-batches."""
        self._load, self._seconds = load, 0.0

    def end(self) -> float:
        """Free them. Returns the seconds that forward passes took."""
        self._received = None
        del self._load, self.micro_batch
        return self._seconds

    def _hidden(self, input_ids: Tensor, received: Tensor | None = None) -> Tensor:
        """The hidden states after this stage, of all positions or of this rank's part."""
        given: dict[str, Any] = self._sequence.part(input_ids) if self._sequence else {"input_ids": input_ids}
        if received is not None:
            self._received = received
            given = {**given, "input_ids": None, "inputs_embeds": received}
        hidden = self._trunk(**given, use_cache=False).last_hidden_state
        return self._sequence.join(hidden) if self._sequence and self._is_last else hidden

    def _whole_forward(
        self, input_ids: Tensor, rows: Tensor, columns: Tensor, packing: None, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        return in_chunks(self._head, self._hidden(input_ids)[rows, columns], targets, temperatures, self._columns)

    def _staged_forward(self, index: Tensor, hidden_states: Tensor | None = None) -> dict[str, Tensor]:
        started = time.perf_counter()
        self.micro_batch = batch = self._load(int(index))
        hidden = self._hidden(batch.input_ids, hidden_states)
        outputs = {"hidden_states": hidden}
        if self._is_last:
            chosen = hidden[batch.rows, batch.columns]
            log_probs, entropy = in_chunks(self._head, chosen, batch.targets, batch.temperatures, self._columns)
            outputs = {"log_probs": log_probs, "entropy": entropy}
        self._seconds += time.perf_counter() - started
        return outputs

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.causal_lm.lm_head(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()
        config, first = self.causal_lm.config, dist.get_rank(self._tp_group) * self._columns
        logits = after_output_layer(logits, config).div_(temperatures[:, None])
        return vocab_parallel_log_probs(logits, targets, first, self._tp_group)
