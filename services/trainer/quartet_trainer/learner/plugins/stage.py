"""A sharded causal language model that gives log-probs of chosen tokens, whole or as one stage of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from quartet_trainer.batches import MicroBatch
from quartet_trainer.learner.plugins.sequence import SequenceParallel
from quartet_trainer.learner.policy import in_chunks
from quartet_trainer.learner.vocab_parallel import vocab_parallel_log_probs


class Stage:
    """Replaces the forward of a model that ColossalAI has sharded.

    The model's own forward would make the logits of all positions. Here its output layer passes the hidden states
    through, so that the stage's forward (which ColossalAI writes for each family) ends in them, and the layer itself is
    applied afterwards, to the tokens asked for, a chunk at a time.

    As a whole model it is called with `MicroBatch.inputs` and gives log-probs and entropy. As a stage it is called by
    ColossalAI's schedule with the number of a micro-batch, which it loads itself, and the hidden states of the stage
    before; it gives hidden states, or from the last stage {"log_probs", "entropy"}.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        staged: bool,
        is_last: bool,
        tp_group: dist.ProcessGroup,
        sequence: SequenceParallel | None,
    ) -> None:
        """Take the sharded model; its `forward` is this stage's from now on. `sequence`: how it shares sequences."""
        self.causal_lm = causal_lm
        self.micro_batch: MicroBatch
        """The one last loaded."""
        self._is_last = is_last
        self._tp_group = tp_group
        self._sequence = sequence
        self._load: Callable[[int], MicroBatch]
        self._seconds = 0.0
        self._inner_forward = causal_lm.forward
        output = causal_lm.get_output_embeddings()
        self._project: Callable[[Tensor], Tensor] = output.forward
        if staged:
            output.forward = lambda hidden: hidden
        causal_lm.forward = self._staged_forward if staged else self._whole_forward
        weight = output.weight if is_last else None
        self._columns = 0 if weight is None else weight.shape[0]

    def begin(self, load: Callable[[int], MicroBatch]) -> None:
        """Say where the schedule's next micro-batches come from."""
        self._load, self._seconds = load, 0.0

    def end(self) -> float:
        """Let them go. Returns the seconds that forwards took."""
        del self._load, self.micro_batch
        return self._seconds

    def _whole_forward(
        self, input_ids: Tensor, rows: Tensor, columns: Tensor, shared: None, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._sequence:
            input_ids = self._sequence.pad(input_ids)
        hidden = self.causal_lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[rows, columns]
        return in_chunks(self._head, hidden, targets, temperatures, self._columns)

    def _staged_forward(self, index: Tensor, hidden_states: Tensor | None = None) -> dict[str, Tensor]:
        started = time.perf_counter()
        self.micro_batch = batch = self._load(int(index))
        input_ids = self._sequence.pad(batch.input_ids) if self._sequence else batch.input_ids
        outputs = self._inner_forward(input_ids=input_ids, hidden_states=hidden_states, use_cache=False)
        if self._is_last:
            hidden = self._sequence.last(outputs.logits) if self._sequence else outputs.logits
            hidden = hidden[batch.rows, batch.columns]
            log_probs, entropy = in_chunks(self._head, hidden, batch.targets, batch.temperatures, self._columns)
            outputs = {"log_probs": log_probs, "entropy": entropy}
        self._seconds += time.perf_counter() - started
        return outputs

    def _head(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._project(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()
        first = dist.get_rank(self._tp_group) * self._columns
        return vocab_parallel_log_probs(
            logits.div_(temperatures[:, None]), targets, first, self.causal_lm.config.vocab_size, self._tp_group
        )
