"""vLLM as a `Core`: its engine core in this process, stepped by us, or in processes of its own, which step themselves.

What stands between vLLM's engine core and the user of a service (texts, ranks, request objects) is left out: requests
go in, tokens with their log-probs come out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quartet_rollout.engines.arena import Arena
from quartet_rollout.engines.base import EngineError, FinishReason, SamplingMask, SamplingSettings, SleepLevel
from quartet_rollout.engines.core import CoreCompletion
from quartet_rollout.engines.masks import masked
from quartet_rollout.engines.model_folder import check_model_folder
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.vllm_engine import environment
from quartet_rollout.engines.vllm_engine.client import Client, ProcessClient
from quartet_rollout.engines.vllm_engine.rows import Row

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutputs

_KINDS_OF_SAMPLING = 64


class VllmCore:
    """One at a time in a process: vLLM keeps its process groups in global variables, and closing one engine would take
    them from the other."""

    _alive = False

    def __init__(self, model_path: str, options: VllmOptions) -> None:
        check_model_folder(model_path)
        if VllmCore._alive:
            raise EngineError("a process can hold one vllm engine at a time, and this one has one")
        VllmCore._alive = True
        torch.set_num_threads(options.threads)

        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        from quartet_rollout.engines.vllm_engine.arguments import engine_arguments

        self._arena: Arena | None = None
        # A step must return the tokens it computed: with asynchronous scheduling they come one step later, and an
        # installation in between would put them under the wrong version.
        config = EngineArgs(**engine_arguments(model_path, options), async_scheduling=False).create_engine_config()
        if config.model_config.enforce_eager:
            environment.disable_compilation()
        self._client = Client(config) if options.form == "in_process" else ProcessClient(config)
        self._inputs = InputProcessor(config, renderer_from_config(config))
        self._prepared = lru_cache(_KINDS_OF_SAMPLING)(self._prepare)
        self.max_model_len = config.model_config.max_model_len
        self.vocab_size = config.model_config.get_vocab_size()
        self.gives_masks = all(self._client.workers("quartet_attach_masks"))
        self.can_sleep = options.sleep_mode
        self._rows: dict[str, Row] = {}  # By vLLM's names for them.
        self._names: dict[str, str] = {}  # Those names, by the keys of those who ask.
        self._numbers = itertools.count()
        self._running, self._kv_cache_use = 0, 0.0

    # ------------------------------------------------------------------ rows

    def add(self, key: str, prompt_token_ids: list[int], sampling: SamplingSettings) -> None:
        from vllm.v1.engine import EngineCoreRequest

        parameters = self._prepared(replace(sampling, seed=None))
        if sampling.seed is not None:
            parameters = copy(parameters)
            parameters.seed = sampling.seed
        name = f"{next(self._numbers)}"
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=key,
        )
        row = self._rows[name] = Row(key, masked(sampling), self._texts(request))
        self._names[key] = name
        if row.masked:
            self._client.workers("quartet_want_masks", name)
        self._client.vllm.add_request(request)

    def _prepare(self, sampling: SamplingSettings) -> SamplingParams:
        """vLLM's parameters, with what it adds itself (the model's ends of sequence)."""
        from quartet_rollout.engines.vllm_engine.arguments import sampling_parameters

        prompt: Any = {"type": "token", "prompt_token_ids": [0]}
        request = self._inputs.process_inputs("", prompt, sampling_parameters(sampling), ("generate",))
        assert request.sampling_params is not None
        return request.sampling_params

    def _texts(self, request: Any) -> Any:
        if not request.sampling_params.stop:
            return None
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer.from_new_request(self._inputs.tokenizer, request)

    def step(self) -> list[CoreCompletion]:
        return self._take(self._client.outputs())

    def _take(self, outputs: EngineCoreOutputs) -> list[CoreCompletion]:
        ended: list[CoreCompletion] = []
        stopped: list[str] = []
        for output in outputs.outputs:
            name = output.request_id
            row = self._rows.get(name)
            if row is None:  # It was aborted meanwhile.
                continue
            reason = row.take(output)
            if reason is not None:
                ended.append(self._end(name, row, reason))
                if output.finish_reason is None:
                    stopped.append(name)
        if stopped:
            self._client.vllm.abort_requests(stopped)
        if (stats := outputs.scheduler_stats) is not None:
            self._running, self._kv_cache_use = stats.num_running_reqs, stats.kv_cache_usage
        return ended

    def _end(self, name: str, row: Row, reason: FinishReason) -> CoreCompletion:
        del self._rows[name], self._names[row.key]
        mask = None
        if row.masked:
            counts, ids = self._client.workers("quartet_take_masks", name, len(row.tokens))[0]
            mask = SamplingMask(np.frombuffer(counts, np.int32), np.frombuffer(ids, np.int32))
        return row.completion(reason, mask)

    def abort(self, keys: Iterable[str]) -> list[CoreCompletion]:
        names = [self._names[key] for key in keys if key in self._names]
        self._client.vllm.abort_requests(names)
        return [self._end(name, self._rows[name], "abort") for name in names]

    def lengths(self) -> dict[str, int]:
        return {row.key: len(row.tokens) for row in self._rows.values()}

    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self._rows.values())

    def running(self) -> int:
        return min(self._running, len(self._rows))

    def kv_cache_use(self) -> float:
        return self._kv_cache_use if self._rows else 0.0

    # ---------------------------------------------------------------- pauses

    def hold(self) -> list[CoreCompletion]:
        if not self._client.computes_ahead:
            return []
        self._client.call("pause_scheduler", "keep", False)
        return [one for outputs in self._client.ready_outputs() for one in self._take(outputs)]

    def go_on(self) -> None:
        if self._client.computes_ahead:
            self._client.call("resume_scheduler")

    # --------------------------------------------------------------- weights

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._client.workers("start_weight_update")
        self._client.workers("update_weights", self._update(tensors))
        self._client.workers("finish_weight_update")

    def _update(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """What the workers' weight-transfer backend is told."""
        if not self._client.computes_ahead:
            return {"tensors": tensors}
        if self._arena is None:
            self._arena = Arena()
        return {"shared": self._arena.put(tensors)}

    def reset_kv_cache(self) -> None:
        self._client.call("reset_prefix_cache", True, False)

    def sleep(self, level: SleepLevel) -> None:
        self._client.call("sleep", level, "keep")

    def wake(self) -> None:
        self._client.call("wake_up", None)
        self.hold()  # vLLM's waking also goes on.

    def close(self) -> None:
        self._client.close()
        if self._arena is not None:
            self._arena.close()
        VllmCore._alive = False
