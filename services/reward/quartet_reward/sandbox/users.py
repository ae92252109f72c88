"""The users that root's sandbox gives to its slots.

They are a range that no other sandbox of this machine has: two sandboxes with the same users would kill each
other's programs, and a program killed so would seem to have failed.
"""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from quartet_reward.sandbox.api import SandboxUnavailable

_BLOCK = 64  # users are taken in blocks of so many, a locked file each
_MOST_BLOCKS = 64  # from `reward.sandbox.first_uid` on


class Users:
    """A range of user ids, had until `release` or the process's end."""

    def __init__(self, wanted: int, count: int):
        """Take `count` users from `wanted` on, or from the first place after it where they are free.

        Raises:
            SandboxUnavailable: there are none, or the files that say so cannot be written.
        """
        self._locks: list[int] = []
        try:
            folder = _folder()
            for place in range(_MOST_BLOCKS):
                self.first = wanted + place * _BLOCK
                if self._take(folder, range(self.first // _BLOCK, (self.first + count - 1) // _BLOCK + 1)):
                    return
        except OSError as error:
            raise SandboxUnavailable(f"cannot tell other sandboxes which users are taken: {error}") from error
        raise SandboxUnavailable(
            f"other sandboxes have all users from {wanted} to {wanted + _MOST_BLOCKS * _BLOCK - 1}: set "
            "reward.sandbox.first_uid to others"
        )

    def release(self) -> None:
        """Let others have them."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _take(self, folder: Path, blocks: range) -> bool:
        for block in blocks:
            lock = os.open(folder / f"users-{block}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                return False
        return True


def _folder() -> Path:
    """Return the folder of the locks, which only root may write."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    folder = base / "quartet-sandbox"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder
