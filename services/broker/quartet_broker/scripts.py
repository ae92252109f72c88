"""The Lua scripts of `lua/`, by name: each is one state transition (docs/broker.md)."""

import hashlib
from functools import cached_property
from importlib.resources import files

_FOLDER = files("quartet_broker") / "lua"
_LIBRARY = ("base", "moments", "life", "settle", "curriculum", "membership", "session")
"""In this order: later parts use earlier ones."""


class Script:
    """`lua/NAME.lua`, preceded by the library and wrapped in its `finish` (base.lua)."""

    def __init__(self, name: str):
        self._name = name

    @cached_property
    def text(self) -> str:
        """What Redis runs."""
        library = "".join((_FOLDER / "lib" / f"{part}.lua").read_text(encoding="utf-8") for part in _LIBRARY)
        body = (_FOLDER / f"{self._name}.lua").read_text(encoding="utf-8")
        return f"{library}\nreturn finish((function()\n{body}\nend)())\n"

    @cached_property
    def sha(self) -> str:
        """The SHA-1 by which Redis calls it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


ADD_EVENT = Script("add_event")
AUDIT_BOOKS = Script("audit_books")
COMMIT = Script("commit")
CREATE_RUN = Script("create_run")
DELETE_KEYS = Script("delete_keys")
DELETE_PORTION = Script("delete_portion")
DELETE_RUN = Script("delete_run")
DROP_EXPERIENCE = Script("drop_experience")
DUMP_BOOKS = Script("dump_books")
END_PROMPTS = Script("end_prompts")
EXTEND_RUN = Script("extend_run")
FINISH_RUN = Script("finish_run")
HEARTBEAT = Script("heartbeat")
LEASE_EXPERIENCE = Script("lease_experience")
LEASE_PROMPTS = Script("lease_prompts")
LEAVE_MEMBER = Script("leave_member")
LIST_MEMBERS = Script("list_members")
LIST_OUTCOMES = Script("list_outcomes")
MARK_TRAINED = Script("mark_trained")
OPEN_SESSION = Script("open_session")
PUT_EXPERIENCE = Script("put_experience")
REGISTER_MEMBER = Script("register_member")
RELEASE_LEASES = Script("release_leases")
RENEW_LEASES = Script("renew_leases")
REQUEUE_DEAD = Script("requeue_dead")
SETTLE_CONSUMED = Script("settle_consumed")
SETTLE_TRAINED = Script("settle_trained")
START_EVALUATION = Script("start_evaluation")
SUBMIT_PROMPTS = Script("submit_prompts")
SWEEP = Script("sweep")
