"""Checks of a Hugging Face model folder that need neither torch nor transformers, and its checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet_common.run_file import ConfigError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = 100 << 20  # the format's own limit

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json for the number of experts of a layer."""
EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys of config.json for the number of experts that each token is routed to."""


def read_model_folder(
    path: Path | None, key: str = "model.path", safetensors: bool = True, weights: bool = True
) -> dict[str, Any]:
    """Return config.json of a model folder, after checking that its weights are complete.

    Args:
        key: of the run file, for errors.
        safetensors: the weights must be in this format; False: weights in other formats are accepted unchecked.
        weights: False: do not check weights.

    Raises:
        ConfigError: no folder, no config.json, no weights in safetensors, or truncated files.
    """
    if path is None:
        raise ConfigError(f"{key} is missing: it names the Hugging Face folder of the model to train")
    if not path.is_dir():
        what = f"'{path}' is a file" if path.is_file() else f"there is no folder '{path}'"
        raise ConfigError(f"{key}: {what}; a Hugging Face model folder is needed{_other_form(path.parent)}")
    config = _read_json(path / "config.json", key)
    files = []
    if not weights:
        return config
    if (path / _INDEX).is_file():
        files = sorted({path / name for name in _read_json(path / _INDEX, key).get("weight_map", {}).values()})
    elif safetensors or (path / _SINGLE).is_file():
        files = [path / _SINGLE]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{key}: '{path}' has no {file.name}; weights are read from safetensors alone{_other_form(path)}"
            )
        read_safetensors_header(file, key)
    return config


_OTHER_FORMS = {
    "adapter_config.json": "an adapter: merge it into its model by peft's merge_and_unload, and save that",
    "*.gguf": "in GGUF: name the folder that it was converted from",
    "pytorch_model*.bin": "pickled: load it with transformers and save it by save_pretrained",
}


def _other_form(folder: Path) -> str:
    """Return what a folder has instead of a model, and the cure."""
    return next((f"; this one is {what}" for name, what in _OTHER_FORMS.items() if any(folder.glob(name))), "")


def read_safetensors_header(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Return name → {"dtype", "shape", "data_offsets"} of the tensors in a safetensors file.

    Raises:
        ConfigError: it is no safetensors file, or it is truncated.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _HEADER_BYTES)))
        tensors = {name: each for name, each in header.items() if name != "__metadata__"}
        end = 8 + length + max((each["data_offsets"][1] for each in tensors.values()), default=0)
        size = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{key}: '{path}' is no safetensors file; is it a pointer of Git LFS? ({error})") from error
    if size < end:
        raise ConfigError(f"{key}: '{path}' has {size} bytes of {end}; copy it again")
    return tensors


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        needed = f"a Hugging Face model folder is needed{_other_form(path.parent)}"
        raise ConfigError(f"{key}: '{path.parent}' has no {path.name}; {needed}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: '{path}' is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{key}: '{path}' is not a JSON object")
    return found


def fixed_rope_length(config: Mapping[str, Any]) -> int | None:
    """Return the length in tokens up to which a model's rotary frequencies do not depend on the sequence's length.

    `longrope` has two lists of factors, for sequences up to `original_max_position_embeddings` and for longer ones;
    `dynamic` (NTK) scales its base beyond `max_position_embeddings`. Beyond that length transformers chooses by the
    longest row of the batch and vLLM by its `max_model_len`, so the same tokens get different log-probs.

    Args:
        config: the model's config.json, with `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5), for
            all layers or one for each type of layer.

    Returns:
        None if the frequencies never depend on the length.
    """
    text = config.get("text_config") or config
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    context = text.get("max_position_embeddings")
    lengths = []
    for rope in (scaling, *scaling.values()):
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
        if kind in ("longrope", "su") and rope["short_factor"] != rope["long_factor"]:
            original = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            lengths.append(original or context)
        elif kind == "dynamic":
            lengths.append(context)
    return min((int(length) for length in lengths if length), default=None)


def set_number(config: Any, keys: Sequence[str]) -> int:
    """Return the first positive integer that a mapping or object has under one of the keys; 0 if there is none."""
    get = config.get if isinstance(config, Mapping) else lambda key: getattr(config, key, None)
    return next((value for key in keys if isinstance(value := get(key), int) and value > 0), 0)


def at_most(length: int) -> str:
    """Return what is allowed, for an error about more tokens than `fixed_rope_length`."""
    return f"at most {length}, as beyond that rope_scaling in config.json makes log-probs depend on the batch"


def check_same_vocabulary(model: Path, other: Path, key: str) -> None:
    """Check that a model reads the tokens of another, as far as their files say.

    Their `vocab_size` may differ by padding: Qwen2.5's models of one tokenizer have 151,936 and 152,064 rows.

    Args:
        model: the folder of the policy.
        other: the folder that `key` of the run file names.

    Raises:
        ConfigError: the tokens differ, or `other` has fewer rows; a tokenizer cannot be read.
    """
    files = [folder / "tokenizer.json" for folder in (model, other)]
    if all(file.is_file() for file in files):
        from tokenizers import Tokenizer

        try:
            own, others = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        except Exception as error:  # the library raises no other
            raise ConfigError(f"{key}: a tokenizer cannot be read: {error}; copy it again") from error
        if unlike := sorted(own.items() ^ others.items(), key=lambda one: (one[1], one[0])):
            token, number = unlike[0]
            raise ConfigError(
                f"{key}: '{other}' has other tokens than the policy, the first is {number} ({token!r}); allowed: a "
                "model with the policy's tokenizer"
            )
    rows, needed = (_read_json(folder / "config.json", key).get("vocab_size") for folder in (other, model))
    if rows is not None and needed is not None and rows < needed:
        raise ConfigError(f"{key}: '{other}' has a vocab_size of {rows}; allowed: the policy's {needed} or more")


def folder_checksum(folder: Path) -> int:
    """Return the 64-bit XXH3 of a model folder's safetensors files, in the order of their names.

    Services compare it to check that they read the same base model. Raises OSError, ValueError without such files.
    """
    import xxhash  # trainer and rollout have it

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there is no *.safetensors file in '{folder}'; name a model folder in that format")
    hashed = xxhash.xxh3_64()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(16 << 20):
                hashed.update(block)
    return hashed.intdigest()
