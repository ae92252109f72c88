"""How a prompt's completions are drawn: the prompt's sampling over the run's over the contract's defaults."""

from dataclasses import dataclass

from quartet.v1 import broker_pb2, experience_pb2

from quartet_rollout.engines.base import SamplingSettings


class PromptRefused(Exception):
    """A prompt that can never be generated from, as it is. `field` is where, the text is one sentence."""

    def __init__(self, field: str, came: object, allowed: str):
        super().__init__(f"{field}: got {came}; allowed: {allowed}")
        self.field, self.came, self.allowed = field, came, allowed


@dataclass(frozen=True)
class Draw:
    """What is asked of the engine for one prompt."""

    n: int
    """Completions."""
    settings: SamplingSettings
    """How each is drawn."""


def sampling_layers(
    prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int
) -> list[experience_pb2.SamplingParams]:
    """Return the sampling parameters that apply, strongest first.

    An evaluation's unset fields take the training sampling's values, so that `max_new_tokens` need not be said twice;
    but not its `n`: see `completions_per_prompt`.
    """
    layers = [prompt.sampling]
    if spec is not None and purpose == experience_pb2.PURPOSE_EVALUATE:
        layers.append(spec.evaluation_sampling)
    if spec is not None:
        layers.append(spec.sampling)
    return layers


def completions_per_prompt(prompt: experience_pb2.Prompt, spec: broker_pb2.RunSpec | None, purpose: int) -> int:
    """Return n: the prompt's, the run's, and else 1 in an evaluation, the group size otherwise (1 without a run).

    Raises:
        PromptRefused: outside 1 to 1024.
    """
    layers = sampling_layers(prompt, spec, purpose)
    if purpose == experience_pb2.PURPOSE_EVALUATE and spec is not None:
        layers = layers[:2]
        default = 1
    else:
        default = spec.group_size if spec is not None else 1
    n = next((layer.n for layer in layers if layer.n), default or 1)
    if not 1 <= n <= 1024:
        raise PromptRefused("prompt.sampling.n", n, "1 to 1024")
    return n


def new_tokens_wanted(layers: list[experience_pb2.SamplingParams]) -> int:
    """Return `max_new_tokens`; 0 where nobody says, which stands for what the context leaves.

    Raises:
        PromptRefused: below 0.
    """
    wanted = next((layer.max_new_tokens for layer in layers if layer.max_new_tokens), 0)
    if wanted < 0:
        raise PromptRefused("prompt.sampling.max_new_tokens", wanted, "an integer >= 1, or 0 for the run's value")
    return wanted


def settings_of(
    layers: list[experience_pb2.SamplingParams], max_new_tokens: int, masks: bool = False
) -> SamplingSettings:
    """Return the engine's settings; `max_new_tokens` is decided already, because it depends on the prompt's length.

    Raises:
        PromptError: a value is out of range.
    """

    def first(field: str, default):
        return next((getattr(layer, field) for layer in layers if layer.HasField(field)), default)

    def first_list(field: str) -> tuple:
        return tuple(next((values for layer in layers if (values := getattr(layer, field))), ()))

    return SamplingSettings(
        temperature=first("temperature", 1.0),
        top_p=first("top_p", 1.0),
        top_k=first("top_k", 0),
        min_p=first("min_p", 0.0),
        max_new_tokens=max_new_tokens,
        stop=first_list("stop"),
        stop_token_ids=first_list("stop_token_ids"),
        seed=first("seed", None),
        masks=masks,
    )
