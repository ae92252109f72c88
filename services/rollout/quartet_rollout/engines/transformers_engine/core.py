"""The decode loop over a `transformers` causal language model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from quartet_rollout.engines.base import EngineError, FinishReason, SamplingSettings, SleepLevel
from quartet_rollout.engines.core import CoreCompletion
from quartet_rollout.engines.model_folder import check_model_folder, config_dtype, load_tokenizer
from quartet_rollout.engines.options import TransformersOptions
from quartet_rollout.engines.transformers_engine.batch import Batch, Row
from quartet_rollout.engines.transformers_engine.sampler import Sampler


class TransformersCore:
    """`Core` with one batch of running rows and a queue of waiting ones.

    A step either takes in waiting rows (their prompts in one forward pass, their first token), or, when none fits,
    draws one token for each running row. Rows whose keys and values were forgotten wait like new ones, their output
    being part of the prompt then.
    """

    gives_masks = True

    def __init__(self, model_path: str, options: TransformersOptions) -> None:
        check_model_folder(model_path)
        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)  # Of this thread.
        transformers_logging.disable_progress_bar()
        dtype = config_dtype(model_path) if options.dtype == "auto" else options.dtype
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model = model.to(self._device).eval()
        self.can_sleep = self._device.type == "cuda"
        self._tokenizer = load_tokenizer(model_path)
        self._max_rows = options.max_num_seqs
        self._max_prefill_tokens = options.max_prefill_tokens
        self.vocab_size = int(self._model.config.vocab_size)
        self.max_model_len = _context(int(self._model.config.max_position_embeddings), options.max_model_len)
        self._end_tokens = _end_of_sequence(self._model, self._tokenizer)
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._sampler: Sampler | None = None

    # ------------------------------------------------------------------ rows

    def add(self, key: str, prompt_token_ids: list[int], sampling: SamplingSettings) -> None:
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator(self._device).manual_seed(sampling.seed)
        self._waiting.append(Row(key, prompt_token_ids, sampling, generator))

    def abort(self, keys: Iterable[str]) -> list[CoreCompletion]:
        chosen = set(keys)
        ended = [row for row in (*self._running(), *self._waiting) if row.key in chosen]
        self._waiting = deque(row for row in self._waiting if row.key not in chosen)
        self._keep([i for i, row in enumerate(self._running()) if row.key not in chosen])
        return [row.completion("abort") for row in ended]

    def lengths(self) -> dict[str, int]:
        return {row.key: len(row.output) for row in (*self._running(), *self._waiting)}

    def running(self) -> int:
        return len(self._running())

    def kv_cache_use(self) -> float:
        return -1.0

    def sleep(self, level: SleepLevel) -> None:
        self.reset_kv_cache()
        self._model.to("cpu")
        torch.cuda.empty_cache()

    def wake(self) -> None:
        self._model.to(self._device)

    def close(self) -> None:
        self._batch, self._sampler, self._model = None, None, None
        self._waiting.clear()

    def hold(self) -> list[CoreCompletion]:
        return []  # Nothing happens between two steps.

    def go_on(self) -> None:
        """Nothing to do."""

    # --------------------------------------------------------------- weights

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in tensors:
            parameters[name].copy_(tensor)

    def reset_kv_cache(self) -> None:
        self._waiting.extendleft(reversed(self._running()))
        self._batch = None

    # ------------------------------------------------------------------ steps

    def step(self) -> list[CoreCompletion]:
        admitted = self._admit()
        if admitted:
            logits = self._prefill(admitted)
            first = len(self._running()) - len(admitted)
        elif self._batch is not None:
            logits = self._decode(self._batch)
            first = 0
        else:
            return []
        assert self._batch is not None
        rows = self._batch.rows[first:]
        if admitted:
            self._sampler = None
            sampler = self._make_sampler(rows)
        else:
            self._sampler = sampler = self._sampler or self._make_sampler(rows)
        tokens, log_probs = sampler.sample(logits)
        ended: list[CoreCompletion] = []
        kept = list(range(first))
        for i, (row, token, log_prob) in enumerate(zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)):
            row.output.append(token)
            row.log_probs.append(log_prob)
            if i in sampler.candidates:
                row.candidates.append(sampler.candidates[i])
            reason = self._end(row)
            if reason is None:
                kept.append(first + i)
            else:
                ended.append(row.completion(reason))
        if ended:
            self._keep(kept)
        return ended

    def _admit(self) -> list[Row]:
        """Take waiting rows, in order, while there are places and their padded prompts fit one forward pass."""
        admitted: list[Row] = []
        widest = 0
        distinct: set[tuple[int, ...]] = set()
        while self._waiting and len(self._running()) + len(admitted) < self._max_rows:
            tokens = tuple(self._waiting[0].tokens())
            widest = max(widest, len(tokens))
            if admitted and len(distinct | {tokens}) * widest > self._max_prefill_tokens:
                break
            distinct.add(tokens)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, rows: list[Row]) -> torch.Tensor:
        """Compute the rows' tokens and add them to the batch. Returns the last token's logits, [rows, V]."""
        # The completions of a group begin with the same prompt: it is computed once.
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
        logits = self._forward(ids.to(self._device), mask.to(self._device), positions.to(self._device), cache)
        if len(distinct) < len(rows):
            index = torch.tensor(which, device=self._device)
            cache.batch_select_indices(index)
            mask, logits = mask.to(self._device)[index], logits[index]
        new = Batch(rows, cache, mask.to(self._device))
        if self._batch is None:
            self._batch = new
        else:
            self._batch.extend(new)
        return logits

    def _decode(self, batch: Batch) -> torch.Tensor:
        ids = torch.tensor([row.output[-1] for row in batch.rows], device=self._device)[:, None]
        positions = batch.mask.sum(dim=-1, keepdim=True)
        batch.mask = torch.nn.functional.pad(batch.mask, (0, 1), value=1)
        return self._forward(ids, batch.mask, positions, batch.cache)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _end(self, row: Row) -> FinishReason | None:
        """Why this row ends with its newest token, if it does."""
        token = row.output[-1]
        if token in self._end_tokens or token in row.sampling.stop_token_ids or self._ends_with_stop_string(row):
            return "stop"
        full = len(row.prompt) + len(row.output) >= self.max_model_len
        return "length" if full or len(row.output) >= row.sampling.max_new_tokens else None

    def _ends_with_stop_string(self, row: Row) -> bool:
        if not row.sampling.stop:
            return False
        # A token is at least one byte of text, so as many of the newest tokens hold any stop string that ends in them.
        window = max(len(text.encode()) for text in row.sampling.stop) + 1
        text = self._tokenizer.decode(row.output[-window:], skip_special_tokens=False)
        return any(stop in text for stop in row.sampling.stop)

    # ---------------------------------------------------------------- helpers

    def _running(self) -> list[Row]:
        return self._batch.rows if self._batch is not None else []

    def _keep(self, rows: list[int]) -> None:
        if self._batch is None or len(rows) == len(self._batch.rows):
            return
        self._sampler = None
        if rows:
            self._batch.keep(rows)
        else:
            self._batch = None

    def _make_sampler(self, rows: list[Row]) -> Sampler:
        return Sampler([row.sampling for row in rows], [row.generator for row in rows], self._device)


def _context(allowed: int, wanted: int | None) -> int:
    if wanted is not None and wanted > allowed:
        raise EngineError(f"rollout.transformers.max_model_len is {wanted}; allowed: at most the model's {allowed}")
    return wanted or allowed


def _end_of_sequence(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids of the generation configuration (one, several or none) and the tokenizer's."""
    ids = model.generation_config.eos_token_id
    found = set(ids) if isinstance(ids, list) else {ids}
    return frozenset(int(token) for token in found | {tokenizer.eos_token_id} if token is not None)
