"""vLLM's synchronous engine in this process, stepped by us: no engine processes, one core, up in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quartet_rollout.engines.base import EngineError, FinishReason, SamplingSettings
from quartet_rollout.engines.core import CoreCompletion
from quartet_rollout.engines.masks import masked
from quartet_rollout.engines.model_folder import check_model_folder
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.vllm_engine import environment
from quartet_rollout.engines.vllm_engine.masks import MaskRecorder

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs


class VllmCore:
    """`Core` over `vllm.v1.engine.llm_engine.LLMEngine`. One at a time in a process: vLLM keeps its process groups in
    global variables, and closing one engine would take them from the other."""

    _alive = False

    def __init__(self, model_path: str, options: VllmOptions) -> None:
        check_model_folder(model_path)
        if VllmCore._alive:
            raise EngineError("a process can hold one vllm engine at a time, and this one has one")
        VllmCore._alive = True
        torch.set_num_threads(options.threads)

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from quartet_rollout.engines.vllm_engine.arguments import engine_arguments, sampling_parameters

        self._sampling_parameters = sampling_parameters
        # A step must return the tokens it computed: with asynchronous scheduling they come one step later, and an
        # installation in between would put them under the wrong version.
        arguments = EngineArgs(**engine_arguments(model_path, options), async_scheduling=False)
        if arguments.enforce_eager:
            environment.disable_compilation()
        self._engine = LLMEngine.from_engine_args(arguments)
        self.max_model_len = self._engine.model_config.max_model_len
        self.vocab_size = self._engine.model_config.get_vocab_size()
        client: Any = self._engine.engine_core  # An InprocClient.
        self._masks = MaskRecorder.attach(self._engine)
        self.gives_masks = self._masks is not None
        self._scheduler = client.engine_core.scheduler
        self._masked: dict[str, str] = {}
        """Keys of completions with masks, and vLLM's names for them."""
        self._states: dict[str, Any] = self._engine.output_processor.request_states

    def add(self, key: str, prompt_token_ids: list[int], sampling: SamplingSettings) -> None:
        prompt: Any = {"prompt_token_ids": prompt_token_ids}
        internal_id = self._engine.add_request(key, prompt, self._sampling_parameters(sampling))
        if self._masks is not None and masked(sampling):
            self._masks.want(internal_id)
            self._masked[key] = internal_id

    def step(self) -> list[CoreCompletion]:
        ended = []
        outputs: list[Any] = self._engine.step()
        for output in outputs:
            completion = output.outputs[0]
            # vLLM also says "abort" and "error" of completions that it gave up itself.
            reason: FinishReason = (
                completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
            )
            ended.append(self._completion(output.request_id, completion.token_ids, completion.logprobs, reason))
        return ended

    def abort(self, keys: Iterable[str]) -> list[CoreCompletion]:
        chosen = set(keys)
        states = [s for s in self._states.values() if s.external_req_id in chosen]
        ended = [
            self._completion(
                state.external_req_id, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs, "abort"
            )
            for state in states
        ]
        self._engine.abort_request(list(chosen))
        return ended

    def lengths(self) -> dict[str, int]:
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in self._states.values()}

    def running(self) -> int:
        return len(self._scheduler.running)

    def kv_cache_use(self) -> float:
        return float(self._scheduler.kv_cache_manager.usage)

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": {"tensors": tensors}})
        self._engine.collective_rpc("finish_weight_update")

    def reset_kv_cache(self) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        VllmCore._alive = False

    def _completion(
        self, key: str, token_ids: Iterable[int], log_probs: FlatLogprobs, reason: FinishReason
    ) -> CoreCompletion:
        tokens = np.array(token_ids, dtype=np.int32)
        # The first entry of each position is the sampled token's.
        values = np.array(log_probs.logprobs, dtype=np.float32)[np.array(log_probs.start_indices, dtype=np.int64)]
        mask = None
        if self._masks is not None and key in self._masked:
            mask = self._masks.take(self._masked.pop(key), len(tokens))
        return CoreCompletion(key, tokens, values[: len(tokens)], reason, mask)
