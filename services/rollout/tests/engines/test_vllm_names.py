"""Every public name of vLLM that the rollout uses, with its parameters, read from vLLM's sources without an import.

They are those of the installed vLLM, or of an unpacked wheel, whose folder QUARTET_VLLM names, e.g. before an upgrade.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import quartet_rollout
from quartet_common.sampling import SamplingParameters

PACKAGE = Path(quartet_rollout.__file__).parent
FOLDERS = (PACKAGE / "engines" / "vllm_engine", PACKAGE / "endpoint")
NAMES: dict[str, str] = {
    "config.weight_transfer:WeightTransferConfig": "backend",
    "distributed.utils:USE_SCHED_YIELD": "",
    "distributed.weight_transfer.base:WeightTransferEngine.finish_weight_update": "self",
    "distributed.weight_transfer.base:WeightTransferEngine.init_transfer_engine": "self, init_info",
    "distributed.weight_transfer.base:WeightTransferEngine.receive_weights": "self, update_info",
    "distributed.weight_transfer.base:WeightTransferEngine.shutdown": "self",
    "distributed.weight_transfer.base:WeightTransferEngine.start_weight_update": "self",
    "distributed.weight_transfer.base:WeightTransferInitInfo": "",
    "distributed.weight_transfer.base:WeightTransferUpdateInfo": "",
    "distributed.weight_transfer.base:WeightTransferUpdateRequest": "update_info",
    "distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (
        "cls, name, module_path_or_cls, class_name"
    ),
    "entrypoints.launchers.api_server.app_state:init_app_state": "engine_client, state, args, supported_tasks",
    "entrypoints.launchers.app:build_app": "args, supported_tasks, model_config",
    "entrypoints.launchers.cli_args:make_arg_parser": "parser",
    "entrypoints.launchers.cli_args:validate_parsed_serve_args": "args",
    "exceptions:VLLMClientError": "",
    "exceptions:VLLMValidationError": "",
    "inputs.engine:tokens_input": "prompt_token_ids, prompt, cache_salt",
    "model_executor.layers.fused_moe.routed_experts:RoutedExperts": "",
    "model_executor.layers.vocab_parallel_embedding:ParallelLMHead": "",
    "model_executor.model_loader.reload.layerwise:finalize_layerwise_reload": "",
    "model_executor.model_loader.reload.layerwise:get_layerwise_info": "layer",
    "model_executor.model_loader.reload.layerwise:initialize_layerwise_reload": "model",
    "outputs:CompletionOutput": "",
    "outputs:RequestOutput": "",
    "outputs:WeightVersionSpan": "version, start, end",
    "platforms.interface:Platform.is_cpu": "self",
    "platforms.interface:Platform.is_sleep_mode_available": "self",
    "sampling_params:RequestOutputKind": "",
    "usage.usage_lib:UsageContext": "",
    "utils.argparse_utils:FlexibleArgumentParser": "",
    "v1.engine.async_llm:AsyncLLM.abort": "self, request_id, internal",
    "v1.engine.async_llm:AsyncLLM.collective_rpc": "self, method, timeout, args, kwargs",
    "v1.engine.async_llm:AsyncLLM.errored": "self",
    "v1.engine.async_llm:AsyncLLM.finish_weight_update": "self, weight_version",
    "v1.engine.async_llm:AsyncLLM.from_engine_args": "cls, engine_args, start_engine_loop, usage_context, stat_loggers",
    "v1.engine.async_llm:AsyncLLM.generate": (
        "self, prompt, sampling_params, request_id, prompt_text, lora_request, tokenization_kwargs, trace_headers, "
        "priority, data_parallel_rank, session_id, kv_hints, reasoning_ended, reasoning_parser_kwargs"
    ),
    "v1.engine.async_llm:AsyncLLM.pause_generation": "self, mode, clear_cache",
    "v1.engine.async_llm:AsyncLLM.reset_prefix_cache": "self, reset_running_requests, reset_connector",
    "v1.engine.async_llm:AsyncLLM.resume_generation": "self",
    "v1.engine.async_llm:AsyncLLM.shutdown": "self, timeout",
    "v1.engine.async_llm:AsyncLLM.sleep": "self, level, mode",
    "v1.engine.async_llm:AsyncLLM.start_weight_update": "self",
    "v1.engine.async_llm:AsyncLLM.update_weight_version": "self, new_version",
    "v1.engine.async_llm:AsyncLLM.update_weights": "self, request",
    "v1.engine.async_llm:AsyncLLM.wake_up": "self, tags",
    "v1.engine.exceptions:EngineDeadError": "",
    "v1.metrics.loggers:StatLoggerBase.record": "self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx",
}
"""By "module:name", the module below `vllm`: names of parameters, or of a data class's fields where there are such."""

FIELDS: dict[str, tuple[str, ...]] = {
    "outputs:CompletionOutput": ("text", "token_ids", "logprobs", "finish_reason", "weight_versions", "routed_experts"),
    "sampling_params:SamplingParams": (
        *(name for name in SamplingParameters.model_fields if name != "max_new_tokens"),
        *("n", "max_tokens", "logprobs", "flat_logprobs", "detokenize", "include_stop_str_in_output"),
        *("skip_special_tokens",),
        *("spaces_between_special_tokens", "output_kind", "extra_args", "skip_clone"),
    ),
    "engine.arg_utils:EngineArgs": (
        *("model", "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization"),
        *("enforce_eager", "enable_prefix_caching", "logprobs_mode", "weight_transfer_config", "worker_extension_cls"),
        *("enable_sleep_mode", "tensor_parallel_size", "disable_log_stats", "use_tqdm_on_load"),
    ),
}
"""Fields of data classes that are read or set, by the name of the class."""


def test_every_name_is_there_with_its_parameters() -> None:
    assert differences(folder()) == []


def test_nothing_private_of_vllm_is_used_and_every_import_is_listed() -> None:
    listed = {name.partition(":")[2].partition(".")[0] for name in (*NAMES, *FIELDS)}
    listed |= {"AsyncEngineArgs", "VllmConfig", "current_platform", "EngineGenerateError", "ModelRegistry"}
    for file in (file for folder in FOLDERS for file in folder.glob("*.py")):
        source = file.read_text()
        for names in re.findall(r"^from vllm[\w.]* import \(?([\w,\s]+?)\)?$", source, re.MULTILINE):
            assert {name.strip() for name in names.split(",") if name.strip()} <= listed, file.name
        assert not re.search(r"(llm|runner|sampler|model|weight_transfer_engine|Factory)\._[a-z]", source), file.name


def folder() -> Path:
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    return Path(os.environ.get("QUARTET_VLLM", found.submodule_search_locations[0]))


def differences(folder: Path) -> list[str]:
    """Return what an installed or unpacked `vllm` folder lacks of `NAMES` and `FIELDS`, or has otherwise."""
    found = []
    for name, expected in NAMES.items():
        node = _find(folder, name)
        if node is None:
            found.append(f"{name} is gone")
        elif expected and (came := _parameters(node)) != expected:
            found.append(f"{name}({came}) was ({expected})")
    for name, fields in FIELDS.items():
        node = _find(folder, name)
        missing = set(fields) - set(_fields(node)) if isinstance(node, ast.ClassDef) else set(fields)
        found += [f"{name}.{field} is gone" for field in sorted(missing)]
    return found


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find(folder: Path, name: str) -> ast.AST | None:
    module, _, path = name.partition(":")
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    node: ast.AST | None = _module(file) if file.is_file() else None
    for part in path.split("."):
        node = next((each for each in getattr(node, "body", []) if part in _defined(each)), None)
    return node


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return ", ".join(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    assert isinstance(node, ast.ClassDef)
    return ", ".join(_fields(node))


def _fields(node: ast.ClassDef) -> list[str]:
    annotated = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
    return [target.id for target in annotated if isinstance(target, ast.Name)]
