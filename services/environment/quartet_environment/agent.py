"""What an agent is given and what it returns: `async def play(task: Task, endpoint: Endpoint) -> float | Reward`."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from quartet_common.python_file import install_command

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SESSION_HEADER = "X-Session-ID"


@dataclass(frozen=True)
class Task:
    """What to play."""

    id: str
    """The prompt's id."""
    data: dict[str, Any]
    """The task's JSON object, or the other columns of the prompt's row."""
    messages: list[dict[str, Any]]
    """The prompt's chat; of a text, one message of the user; of a task, its "messages", if it has them."""
    answer: str
    """The reference answer; empty: none."""
    parameters: dict[str, Any]
    """The environment's parameters, as `play` gets them."""
    index: int
    """Position of this episode in its group, from 0."""
    sampling: dict[str, Any]
    """The run's sampling, as arguments of `chat.completions.create`. The endpoint uses it where a call does not say."""


@lru_cache
def _tls(ca_file: str) -> ssl.SSLContext:
    """Return what all clients of this process share: making one takes tens of milliseconds."""
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    return context


@dataclass(frozen=True)
class Endpoint:
    """The policy, as an OpenAI endpoint. The key is this episode's own and ends with it."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    ca_file: str = ""
    """PEM of the authority that signed an https endpoint's certificate; empty: a public one."""
    session: str = ""
    """The seat whose calls these are; empty: the only one."""
    opened: list[Any] = field(default_factory=list, repr=False, compare=False)
    """The clients that were made, which are closed when the episode ends."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that a client of one's own must send."""
        return {SESSION_HEADER: self.session} if self.session else {}

    @cached_property
    def client(self) -> "AsyncOpenAI":
        """A client of the endpoint, made when it is first used. Raises ImportError without the package openai."""
        try:
            import openai
        except ImportError as error:
            raise ImportError(f"endpoint.client needs the package openai: {install_command('openai')}") from error
        made = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self.api_key,
            default_headers=self.headers,
            http_client=openai.DefaultAsyncHttpxClient(verify=_tls(self.ca_file)),
        )
        self.opened.append(made)
        return made

    def seat(self, name: str) -> "Endpoint":
        """Return the endpoint for one of several agents: its calls are recorded as those of `Seat(name, …)`."""
        return replace(self, session=name)


Value = float | Mapping[str, float | tuple[float, float]]
"""A reward; or several by name, each a number or a number and its weight in the sum."""
Turns = Sequence[float | None] | Mapping[int, float]
"""Rewards of single turns of the policy, besides the episode's: of all in order (None: none), or by turn, from 0."""


@dataclass(frozen=True)
class Seat:
    """The part of one of several agents."""

    name: str
    value: Value | None = None
    """May be left out where it is not trainable."""
    turns: Turns = ()
    sessions: Sequence[str] = ()
    """Values of the header X-Session-ID on its calls. Default: its name, which `Endpoint.seat` sends."""
    trainable: bool = True
    """Whether the policy is trained on its calls."""


@dataclass(frozen=True)
class Reward:
    """What an episode was worth."""

    value: Value | None = None
    turns: Turns = ()
    notes: str = ""
    """For people: shown with the episode. At most 10,000 characters are kept."""
    seats: Sequence[Seat] = ()
    """Where several agents played: theirs, instead of `value` and `turns`."""
