"""The decode loop over a `transformers` causal language model."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from quartet_rollout.engines.base import FinishReason
from quartet_rollout.engines.model_folder import config_dtype, context_length, load_tokenizer
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.attention import layer_kinds, step_mask, use_grouped
from quartet_rollout.engines.transformers_engine.packed import pack_linears
from quartet_rollout.engines.transformers_engine.sampler import sample
from quartet_rollout.engines.transformers_engine.sequences import EngineSequence
from quartet_rollout.engines.transformers_engine.slots import Slots
from quartet_rollout.errors import EngineError
from quartet_weights.routed_experts import Routing

_ADMIT_SHARE = 8
"""While more rows wait than slots are free, prompts are computed once one in this many slots is free."""


class Decoder:
    """One batch of running rows and a queue of waiting ones. All calls come from one thread.

    A step either admits waiting rows (one forward pass for their prompts, their first token), or samples one token for
    each running row. While more rows wait than slots are free, several slots must be free before rows are admitted: a
    forward pass for one prompt costs nearly as much as for several. Rows whose keys and values were discarded wait like
    new ones; their output is then part of the prompt.
    """

    def __init__(self, model_path: str, options: TransformersOptions) -> None:
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)  # In this thread.
        transformers_logging.disable_progress_bar()
        dtype = config_dtype(model_path) if options.dtype == "auto" else options.dtype
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, dtype),
            # torch's fused attention has no logit softcapping. None: fused if the family supports it.
            attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
            local_files_only=True,
        )
        self.model = model.to(self._device).eval()
        self.tokenizer = load_tokenizer(model_path)
        self._max_rows = options.max_num_seqs
        self._max_prefill_tokens = options.max_prefill_tokens
        self.vocab_size = int(self.model.config.vocab_size)
        wanted = context_length(model_path, "rollout.transformers.max_model_len", options.max_model_len)
        self.max_model_len = _context(int(self.model.config.max_position_embeddings), wanted)
        self._ends = _end_of_sequence(self.model, self.tokenizer)
        self._waiting: deque[EngineSequence] = deque()
        self._running: list[EngineSequence] = []
        """Sequence i has slot i: they move when earlier ones end."""
        self._slots = Slots()
        self._kinds = layer_kinds(self.model.config)
        self._window = getattr(self.model.config, "sliding_window", None)
        self.routing = Routing.of(self.model.config, self.model, self._probe)
        use_grouped(self.model)
        self._pack()
        # Eager attention, and ours on the CPU, take an additive mask; None: a boolean one.
        additive = self.model.config._attn_implementation == "eager" or self._device.type == "cpu"
        self._mask_dtype = self.model.dtype if additive else None

    def _pack(self) -> None:
        if self._device.type == "cpu":
            pack_linears(self.model)

    def _probe(self) -> None:
        self.model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=self._device), use_cache=False)

    # ------------------------------------------------------------------ rows

    def add(self, row: EngineSequence) -> None:
        """Queue a completion."""
        row.limit = min(row.sampling.max_new_tokens, self.max_model_len - len(row.prompt))
        if row.sampling.seed is not None:
            row.generator = torch.Generator(self._device).manual_seed(row.sampling.seed + row.index)
        self._waiting.append(row)

    def remove(self, rows: Collection[EngineSequence]) -> None:
        """Remove completions, unfinished ones included."""
        gone = set(rows)
        self._waiting = deque(row for row in self._waiting if row not in gone)
        self._leave([i for i, row in enumerate(self._running) if row in gone])

    @property
    def rows(self) -> list[EngineSequence]:
        """All unfinished completions."""
        return [*self._running, *self._waiting]

    @property
    def busy(self) -> bool:
        """Whether there are unfinished completions."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> int:
        """How many completions have begun, those included whose keys and values will be recomputed."""
        return len(self._running) + sum(1 for row in self._waiting if row.output)

    @property
    def waiting(self) -> int:
        """How many completions have not begun."""
        return sum(1 for row in self._waiting if not row.output)

    @property
    def tokens(self) -> int:
        """Tokens of all unfinished completions together."""
        return sum(len(row.output) for row in self.rows)

    def log_probs(self, tokens: list[int], begin: int) -> list[float]:
        """Return the log-prob of each token from `begin` on, after all before it."""
        ids = torch.tensor([tokens], device=self._device)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(tokens) - begin).logits[0]
        return logits.float().log_softmax(-1).gather(-1, ids[0, begin:, None])[:, 0].tolist()

    # ----------------------------------------------------- memory and weights

    def sleep(self) -> None:
        """Free the accelerator's memory. On a CPU only that of keys and values is freed."""
        self.reset_kv_cache()
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the model back to its device."""
        self.model.to(self._device)

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters. `tensors` are read during the call only."""
        own = self.model.state_dict()
        files = revert_weight_conversion(self.model, {name: tensor.to("meta") for name, tensor in own.items()})
        if files.keys() != own.keys():  # transformers converts this family's tensors when it loads them
            state = {name: tensor.clone() for name, tensor in tensors}
            config = copy.deepcopy(self.model.config)
            loaded = type(self.model).from_pretrained(None, config=config, state_dict=state, dtype=self.model.dtype)
            tensors = iter(loaded.state_dict().items())
        for name, tensor in tensors:
            own[name].copy_(tensor)
        self._pack()

    def reset_kv_cache(self) -> None:
        """Discard all keys and values; the next steps recompute those of unfinished completions."""
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._slots = Slots()

    # ------------------------------------------------------------------ steps

    def step(self, admit: bool = True) -> list[tuple[EngineSequence, FinishReason]]:
        """Generate at most one token for each running completion; return those that ended. Without `admit` new ones
        keep waiting."""
        if admitted := self._admit(admit):
            first = len(self._running)
            logits = self._prefill(admitted)
        elif self._running:
            first = 0
            logits = self._decode()
        else:
            return []
        return self._take(first, *sample(self._running[first:], logits))

    def _admit(self, new: bool) -> list[EngineSequence]:
        """Pop waiting rows, in order, while slots are free and their padded prompts fit one forward pass. Rows that
        have begun come before new ones, which are left if not `new`."""
        places = self._max_rows - len(self._running)
        if not self._waiting or places < min(len(self._waiting), max(1, self._max_rows // _ADMIT_SHARE)):
            return []
        admitted: list[EngineSequence] = []
        widest = 0
        distinct: set[tuple[int, ...]] = set()
        while self._waiting and len(admitted) < places and (new or self._waiting[0].output):
            tokens = tuple(self._waiting[0].tokens())
            widest = max(widest, len(tokens))
            if admitted and len(distinct | {tokens}) * widest > self._max_prefill_tokens:
                break
            distinct.add(tokens)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, rows: list[EngineSequence]) -> torch.Tensor:
        """Compute the rows' tokens and make them running. Returns the last token's logits, [rows, V]."""
        rows.sort(key=EngineSequence.length)  # for `Slots.add`
        # Completions of a group have the same prompt: it is computed once.
        distinct: dict[tuple[int, ...], int] = {}
        which = [distinct.setdefault(tuple(row.tokens()), len(distinct)) for row in rows]
        width = max(len(tokens) for tokens in distinct)
        ids = torch.zeros(len(distinct), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, tokens in enumerate(distinct):
            ids[i, width - len(tokens) :] = torch.tensor(tokens)
            mask[i, width - len(tokens) :] = 1
        positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
        cache = DynamicCache()
        on_device = ids.to(self._device), mask.to(self._device), positions.to(self._device)
        logits, experts = self._forward(*on_device, cache, rows)
        if experts is not None:
            for row, i in zip(rows, which, strict=True):
                row.experts = [experts[i, width - row.length() :]]
        self._slots.add(len(self._running), cache, which, [row.length() for row in rows])
        self._running += rows
        return logits[torch.tensor(which, device=self._device)]

    def _decode(self) -> torch.Tensor:
        """Compute the newest token of each row. Returns logits [rows, V]."""
        rows = self._running
        before = [row.length() - 1 for row in rows]
        positions, widest = torch.tensor(before, device=self._device), max(before)
        ids = torch.tensor([row.output[-1] for row in rows], device=self._device)
        self._slots.expect(positions, widest)
        mask = step_mask(positions, widest + 1, self._kinds, self._window, self._mask_dtype)
        logits, experts = self._forward(ids[:, None], mask, positions[:, None], self._slots.cache, rows)
        if experts is not None:
            for row, own in zip(rows, experts, strict=True):
                row.experts.append(own)
        return logits

    def _forward(
        self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, cache: Cache, rows: list[EngineSequence]
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Return the last position's logits, and if one of `rows` records them the experts [rows, positions, layers,
        n]."""
        wanted = self.routing is not None and any(row.sampling.routed_experts for row in rows)
        with self.routing.record() if self.routing is not None and wanted else nullcontext() as recorded:
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        experts = None if recorded is None else recorded.experts().unflatten(0, ids.shape).cpu().numpy()
        return output.logits[:, -1], experts

    def _take(
        self, first: int, tokens: list[int], log_probs: list[float], candidates: dict[int, np.ndarray]
    ) -> list[tuple[EngineSequence, FinishReason]]:
        """Append tokens to the rows from `first` on. Returns and removes those that end."""
        rows = self._running[first:]
        for i, ids in candidates.items():
            rows[i].candidates.append(ids)
        leaving: list[int] = []
        ended: list[tuple[EngineSequence, FinishReason]] = []
        for i, (row, token, log_prob) in enumerate(zip(rows, tokens, log_probs, strict=True), first):
            row.output.append(token)
            row.log_probs.append(log_prob)
            if (stops := self._stops(row)) or len(row.output) >= row.limit:
                leaving.append(i)
                ended.append((row, "stop" if stops else "length"))
        self._leave(leaving)
        return ended

    def _stops(self, row: EngineSequence) -> bool:
        """Whether the row's newest token is an end of sequence or stop token, or completes a stop string."""
        token = row.output[-1]
        if token in self._ends or token in row.sampling.stop_token_ids:
            return True
        if not row.sampling.stop:
            return False
        # A token is at least one byte of text, so as many of the newest tokens hold any stop string that ends in them.
        window = max(len(text.encode()) for text in row.sampling.stop) + 1
        text = self.tokenizer.decode(row.output[-window:], skip_special_tokens=False)
        return any(stop in text for stop in row.sampling.stop)

    def _leave(self, leaving: Collection[int]) -> None:
        """Remove running rows by index, and move the last rows into their slots."""
        gone, left = set(leaving), len(self._running) - len(leaving)
        to = sorted(i for i in gone if i < left)
        moved = [i for i in range(left, len(self._running)) if i not in gone]
        for place, row in zip(to, moved, strict=True):
            self._running[place] = self._running[row]
        del self._running[left:]
        self._slots.move(to, moved)


def _context(allowed: int, wanted: int | None) -> int:
    if wanted is not None and wanted > allowed:
        raise EngineError(f"rollout.transformers.max_model_len is {wanted}; allowed: at most the model's {allowed}")
    return wanted or allowed


def _end_of_sequence(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the generation configuration (one, several or none) and the tokenizer."""
    ids = model.generation_config.eos_token_id
    found = set(ids) if isinstance(ids, list) else {ids}
    return frozenset(int(token) for token in found | {tokenizer.eos_token_id} if token is not None)
