"""Errors of an engine and its weights; each message gives the reason in one sentence."""


class EngineError(RuntimeError):
    """A call to the engine failed."""


class PromptError(EngineError, ValueError):
    """This model can never serve the prompt or its sampling settings. `place`: of the first token it does not have."""

    def __init__(self, message: str, place: int | None = None):
        super().__init__(message)
        self.place = place


class ManifestError(EngineError, ValueError):
    """The announced weights do not fit this model; the message names the tensor."""


class WeightTransferError(EngineError):
    """Weights did not arrive: a peer died, or the deadline passed. The model is unchanged; the group has been left."""


class WeightInstallError(EngineError):
    """Received weights could not be installed. The model's weights are now unknown, and `policy_version` is -1."""


_BY_NAME = {error.__name__: error for error in (EngineError, PromptError, WeightTransferError, WeightInstallError)}


def pack_error(error: BaseException) -> list[str]:
    """Return an error's name and message, to send to another process. Other errors become EngineError."""
    name = type(error).__name__
    return [name if name in _BY_NAME else EngineError.__name__, str(error)]


def unpack_error(packed: list[str]) -> EngineError:
    """Inverse of `pack_error`."""
    return _BY_NAME[packed[0]](packed[1])
