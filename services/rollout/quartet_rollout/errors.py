"""What can go wrong with an engine and its weights; each text says why in one sentence."""


class EngineError(RuntimeError):
    """The engine cannot do what it was asked."""


class PromptError(EngineError, ValueError):
    """The prompt or its sampling settings cannot be served by this model, now or later."""


class ManifestError(EngineError, ValueError):
    """The weights announced do not fit this model; the text names the tensor."""


class WeightTransferError(EngineError):
    """Weights did not arrive: a peer died, or the deadline passed. The model is as it was; the group has been left."""


class WeightInstallError(EngineError):
    """Weights arrived but could not be installed. The model's weights are now unknown, and `policy_version` is -1."""


_BY_NAME = {error.__name__: error for error in (EngineError, PromptError, WeightTransferError, WeightInstallError)}


def pack_error(error: BaseException) -> list[str]:
    """Name and text of an error, for another process; what is no EngineError is sent as one."""
    name = type(error).__name__
    return [name if name in _BY_NAME else EngineError.__name__, str(error)]


def unpack_error(packed: list[str]) -> EngineError:
    """The error that `pack_error` was given."""
    return _BY_NAME[packed[0]](packed[1])
