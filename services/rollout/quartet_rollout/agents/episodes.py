"""Episodes, and what their agents sampled at the endpoint, call by call.

The gate finds the episode of a request's key and sets `CALLER`; the engine's client, which vLLM's server calls within
the same context, reads it and records.
"""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from quartet_rollout.engines.base import EngineCompletion, SamplingSettings


@dataclass(frozen=True)
class Call:
    """One call of an agent, as sampled."""

    prompt_token_ids: np.ndarray
    """int32 [P]: what the policy read."""
    turn: EngineCompletion
    """What it wrote."""
    question: str
    """The prompt's text as the agent sent it, special tokens included."""
    answer: str
    """The text that the agent got."""
    session: str
    """The call's header X-Session-ID; "" without one."""


@dataclass(eq=False)
class AgentEpisode:
    """One episode while it is played."""

    key: str
    """Its API key."""
    settings: SamplingSettings
    """How its calls sample; `max_new_tokens` is the most of one call."""
    max_calls: int
    """Further ones are refused."""
    calls: list[Call] = field(default_factory=list)
    """In the order in which they ended."""
    trouble: str = ""
    """Why the episode must not be trained on; "" if it may."""
    begun: int = 0
    """Calls so far, those included that have not ended."""

    def finished(self, call: Call) -> None:
        """Record a call that has ended."""
        if call.turn.finish_reason == "abort":
            self.trouble = self.trouble or f"call {len(self.calls)} was aborted by the engine"
        self.calls.append(call)

    def broken_off(self) -> None:
        """Note that a call ended before its last token: what the agent read of it is not known."""
        self.trouble = self.trouble or "the agent left a call before its end"


@dataclass(frozen=True)
class Caller:
    """Who makes a request."""

    episode: AgentEpisode | None
    """None: an application."""
    session: str = ""
    """Header X-Session-ID."""


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Of the request being answered."""


class Episodes:
    """The episodes being played, by key."""

    def __init__(self) -> None:
        self._open: dict[str, AgentEpisode] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, settings: SamplingSettings, max_calls: int) -> AgentEpisode:
        """Begin an episode, with a new key."""
        episode = AgentEpisode(f"episode-{secrets.token_urlsafe(24)}", settings, max_calls)
        self._open[episode.key] = episode
        return episode

    def close(self, episode: AgentEpisode) -> None:
        """End it: its key opens nothing any more."""
        self._open.pop(episode.key, None)
        if episode.begun > len(episode.calls):
            episode.trouble = episode.trouble or "the episode ended while a call was under way"

    def find(self, key: str) -> AgentEpisode | None:
        """Return the episode of a key, if there is one."""
        return self._open.get(key)
