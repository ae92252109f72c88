"""`Engine` over vLLM's `AsyncLLM`."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import psutil
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from quartet_common.log import get_logger
from quartet_common.sampling import FIRST_RELEASE, SamplingParameters, capability
from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineError,
    EngineStats,
    FinishReason,
    PauseMode,
    PromptError,
    SamplingMask,
    SamplingSettings,
    SleepLevel,
    WeightInstallError,
    side_by_side,
)
from quartet_rollout.engines.model_folder import load_tokenizer
from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.process_engine import ProcessEngine
from quartet_rollout.engines.vllm_engine import disable_compilation
from quartet_rollout.engines.vllm_engine.arguments import engine_arguments, sampling_parameters
from quartet_rollout.engines.vllm_engine.worker import OWNER

log = get_logger(__name__)
T = TypeVar("T")

CLOSE_SECONDS = 10.0
LOOK_SECONDS = 0.5
"""Interval of the check whether the engine core still runs: vLLM's calls wait forever for a dead one."""


class Statistics(StatLoggerBase):
    """vLLM's statistics of the last step."""

    def __init__(self, vllm_config: VllmConfig | None = None, engine_index: int = 0) -> None:
        self.running = self.tokens = self.steps = 0
        self.kv_cache_use = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self.running, self.kv_cache_use = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


class VllmEngine(ProcessEngine):
    """One `AsyncLLM`. Its engine core and workers are processes; its output handler runs in the caller's event loop."""

    name = "vllm"

    def __init__(self, model_path: str, options: VllmOptions) -> None:
        super().__init__(model_path)
        self._options = options
        self._llm: AsyncLLM
        self._gives_masks = False
        self._statistics: list[Statistics] = []
        self._numbers = itertools.count()
        self._inside: set[str] = set()
        """Keys of the completions submitted to vLLM."""
        self._parked = 0
        """Completions that wait for the end of a pause. They are submitted to vLLM afterwards, because their cache salt
        depends on the weights."""
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._ended_tokens = 0
        self._keep_kv_cache = False
        self._installs = 0

    # -------------------------------------------------------- start and close

    async def start(self) -> None:
        self._begin()
        os.environ[OWNER] = str(os.getpid())
        try:
            self._llm = await asyncio.to_thread(self._make)
        except EngineError:
            raise
        except Exception as error:
            log.exception("the engine did not start")
            cause = missing_package(self._model_path) or error
            raise EngineError(f"the vllm engine did not start: {cause}") from error
        self._started = True
        self._vocab_size = self._llm.model_config.get_vocab_size()
        self._gives_masks = all(await self._workers("quartet_attach_masks"))
        await self.set_version(UNKNOWN_VERSION)
        await self.load_spec()
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self._model_path)

    def _make(self) -> AsyncLLM:
        arguments = engine_arguments(self._model_path, self._options)
        if arguments["enforce_eager"]:
            disable_compilation()

        def logger(config: VllmConfig, engine_index: int) -> Statistics:
            self._statistics.append(Statistics(config, engine_index))
            return self._statistics[-1]

        # Without a usage context vLLM leaves max_num_batched_tokens at 2048, whatever the GPU.
        context = UsageContext.LLM_CLASS
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=context, stat_loggers=[logger])

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unpaused.set()
        if hasattr(self, "_llm"):
            await self._llm.abort(list(self._inside))
            try:
                await asyncio.to_thread(self._llm.shutdown, CLOSE_SECONDS)
            except asyncio.CancelledError:  # a stopped process would outlive the rollout
                for process in psutil.Process().children(recursive=True):
                    process.kill()
                raise
            del self._llm

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine client, for its OpenAI server; requests go through `sample`."""
        return self._llm

    @property
    def max_model_len(self) -> int:
        return self._llm.model_config.max_model_len

    @property
    def weight_ranks(self) -> int:
        """One rank per worker."""
        parallel = self._llm.vllm_config.parallel_config
        return parallel.world_size * parallel.data_parallel_size

    @property
    def failure(self) -> str:
        if not self._failure and not self._closed and hasattr(self, "_llm") and self._llm.errored:
            self._failure = "the vllm engine failed: its engine core has ended"
            log.error("%s", self._failure)
        return self._failure

    def capabilities(self) -> list[str]:
        masks = ["sampling_masks"] if self._gives_masks else []
        sampling = [capability(name) for name in SamplingParameters.model_fields if name not in FIRST_RELEASE]
        routed = ["routed_experts"] if (self._options.model_extra or {}).get("enable_return_routed_experts") else []
        sleep = ["sleep"] if self._llm.model_config.enable_sleep_mode else []
        return [*self.weight_capabilities(), *sampling, *masks, *routed, *sleep, "log_probs"]

    def stats(self) -> EngineStats:
        running = min(sum(each.running for each in self._statistics), len(self._inside))
        used = max((each.kv_cache_use for each in self._statistics), default=-1.0)
        return EngineStats(
            running=running,
            waiting=len(self._inside) - running + self._parked,
            kv_cache_use=used if self._inside else 0.0,
            tokens_total=max(sum(each.tokens for each in self._statistics), self._ended_tokens),
            steps=sum(each.steps for each in self._statistics),
        )

    # -------------------------------------------------------------- requests

    async def generate(
        self, request_id: str, prompt_token_ids: np.ndarray | list[int], n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        prompt = self._check_request(prompt_token_ids, n, sampling)
        # With n > 1, vLLM returns all completions when the last has ended; so each is a request of its own.
        draws = (self._draw(f"{request_id}/{next(self._numbers)}", prompt, index, sampling) for index in range(n))
        async with aclosing(side_by_side(draws)) as stream:
            async for completion in stream:
                yield completion

    async def log_probs(self, request_id: str, token_ids: list[int], begin: int) -> np.ndarray:
        tokens = self._check_request(token_ids, 1, SamplingSettings())
        params = SamplingParams(
            max_tokens=1,  # vLLM's least
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        key = f"{request_id}/{next(self._numbers)}"
        try:
            (output,) = [output async for output in self.sample(tokens_input(tokens), params, key)]
        except VLLMValidationError as error:
            raise PromptError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._lost(error) from error
        given: Any = output.prompt_logprobs
        # Of each token but the first, its own first, then the likeliest if that is another.
        own = [given.logprobs[start] for start in given.start_indices[begin:]]
        return np.array(own, dtype=np.float32)

    async def sample(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate, for vLLM's OpenAI server: waits for the end of a pause, and counts in `stats`."""
        await self._pause_ended()
        self._check_usable()
        self._inside.add(request_id)
        try:
            inputs = {**prompt, "cache_salt": f"{self._installs} {prompt.get('cache_salt', '')}"}
            async with aclosing(self._llm.generate(inputs, params, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._inside.discard(request_id)

    async def turn(
        self, output: CompletionOutput, token_ids: list[int], log_probs: list[float], mask_key: str
    ) -> EngineCompletion:
        """Return what a request of `sample` drew, from its last output; `mask_key`: its id, if masks are recorded."""
        whole = replace(output, token_ids=token_ids, logprobs=None)
        drawn = await self._completion(0, whole, mask_key)
        return replace(drawn, log_probs=np.array(log_probs, dtype=np.float32))

    async def _pause_ended(self) -> None:
        self._parked += 1
        try:
            while not self._unpaused.is_set():
                await self._unpaused.wait()
        finally:
            self._parked -= 1

    async def _draw(self, key: str, prompt: list[int], index: int, sampling: SamplingSettings) -> EngineCompletion:
        await self._pause_ended()
        if self._closed:
            nothing = SamplingMask.nothing_cut(0) if sampling.masked else None
            return EngineCompletion(index, np.empty(0, np.int32), np.empty(0, np.float32), "abort", (), nothing)
        # After a pause that keeps the KV cache, the salt prevents reuse of prefixes computed with older weights.
        inputs = tokens_input(prompt, cache_salt=str(self._installs))
        self._inside.add(key)
        try:
            stream = self._llm.generate(inputs, sampling_parameters(sampling, index, key), key)
            (output,) = [output async for output in stream]
        except VLLMValidationError as error:
            raise PromptError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise self._lost(error) from error
        finally:
            self._inside.discard(key)
        return await self._completion(index, output.outputs[0], key if sampling.masked else "")

    async def _completion(self, index: int, output: CompletionOutput, mask_key: str) -> EngineCompletion:
        tokens = np.array(output.token_ids, dtype=np.int32)
        self._ended_tokens += len(tokens)
        mask = None
        if mask_key:
            counts, ids = (await self._workers("quartet_take_masks", mask_key, len(tokens)))[0]
            mask = SamplingMask(np.frombuffer(counts, np.int32), np.frombuffer(ids, np.int32))
        experts = output.routed_experts
        if experts is not None and experts.dtype != np.uint8:
            experts = experts.astype(np.int32)
        log_probs: Any = output.logprobs.logprobs if output.logprobs is not None else ()
        # vLLM's other reasons are "abort" and "error".
        reason: FinishReason = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
        return EngineCompletion(
            index=index,
            token_ids=tokens,
            log_probs=np.array(log_probs, dtype=np.float32),
            finish_reason=reason,
            version_spans=tuple(
                (int(span.version), span.start, span.end)
                for span in output.weight_versions or ()
                if span.start < span.end
            ),
            mask=mask,
            routed_experts=experts,
        )

    # ------------------------------------------------------- pause and sleep

    async def pause(self, mode: PauseMode, keep_kv_cache: bool = False) -> None:
        self._check_usable()
        self._keep_kv_cache = keep_kv_cache
        self._unpaused.clear()
        try:
            await self._call(self._llm.pause_generation(mode=mode, clear_cache=False))
        except asyncio.CancelledError:
            await self.resume()
            raise

    async def resume(self) -> None:
        self._check_usable()
        self._keep_kv_cache = False
        self._unpaused.set()
        if self._asleep is None:
            await self._call(self._llm.resume_generation())

    async def _set_sleep(self, level: SleepLevel | None) -> None:
        if level is not None:
            await self._call(self._llm.sleep(level, mode="keep"))
            return
        await self._call(self._llm.wake_up())
        if not self._unpaused.is_set():  # vLLM's wake_up also resumes.
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))

    # --------------------------------------------------------------- weights

    async def call_members(self, method: str, *args: Any) -> list[Any]:
        return await self._workers("quartet_weights", method, *args)

    async def install_weights(self, policy_version: int) -> None:
        self._check_usable(awake=True)
        if not all(await self.call_members("has_received")):
            raise EngineError("no weights were received that could be installed")
        try:
            await self._call(self._llm.start_weight_update())
            await self._call(self._llm.update_weights(WeightTransferUpdateRequest({})))
            await self._call(self._llm.finish_weight_update(str(policy_version)))
            self._installs += 1
            if not self._keep_kv_cache:
                await self._call(self._llm.reset_prefix_cache(reset_running_requests=True))
        except Exception as error:
            await self.set_version(UNKNOWN_VERSION)
            raise WeightInstallError(f"weights of version {policy_version} could not be installed: {error}") from error
        self._version = policy_version

    async def set_version(self, policy_version: int) -> None:
        self._version = policy_version
        if not self.failure:
            await self._call(self._llm.update_weight_version(str(policy_version)))

    # --------------------------------------------------------------- helpers

    async def _workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker."""
        self._check_usable()
        return await self._call(self._llm.collective_rpc(method, args=args))

    async def _call(self, call: Awaitable[T]) -> T:
        """Await a call to vLLM. Raises EngineError when the engine core ends meanwhile."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                if self._llm.errored:
                    raise EngineDeadError()
            return task.result()
        except EngineDeadError as error:
            raise self._lost(error) from error
        finally:
            task.cancel()

    def _lost(self, error: Exception) -> EngineError:
        if self._closed:
            return EngineError("the engine is closed")
        return EngineError(self.failure or f"the vllm engine failed: {error}")


def missing_package(model_path: str) -> str:
    """Return which missing package vLLM's module of the model's class imports, in a sentence; "" for none. vLLM itself
    only reports that the class "failed to be inspected"."""
    for name in AutoConfig.from_pretrained(model_path, local_files_only=True).architectures or ():
        try:
            if name in ModelRegistry.models:
                ModelRegistry.models[name].load_model_cls()
        except ModuleNotFoundError as error:
            return f"vLLM's {name} needs the package {error.name}, which the rollout's environment lacks"
    return ""
