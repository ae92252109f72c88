"""The name of `errors` in version 0.1, for verifiers written then."""

from quartet_reward.errors import VerifierFailure

__all__ = ["VerifierFailure"]
