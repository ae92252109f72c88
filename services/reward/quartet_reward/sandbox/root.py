"""The root that programs see: this Python and its libraries, a few devices, an empty /tmp. Nothing can be written."""

import os
import struct
import sys
import sysconfig

from quartet_reward.sandbox.syscalls import (
    LIBC,
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    call,
    check,
    mount,
)

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_ATTRIBUTES_RDONLY_NOSUID = 3


def python_paths() -> list[str]:
    """Return the files and folders that this interpreter needs, without its site-packages' environment."""
    base = os.path.realpath(sys.base_prefix)
    paths = [
        sysconfig.get_path("stdlib", vars={"base": base, "installed_base": base}),
        sysconfig.get_path("platstdlib", vars={"platbase": base, "installed_platbase": base}),
        sysconfig.get_config_var("LIBDIR") or "",
        os.path.realpath(sys.executable),
    ]
    return [path for path in dict.fromkeys(map(os.path.realpath, filter(None, paths))) if os.path.exists(path)]


def readable_paths(extra: list[str]) -> list[str]:
    """Return what is bound into the root, parents before children and nothing twice."""
    chosen: list[str] = []
    for path in sorted({*python_paths(), *_LIBRARIES, *extra}):
        covered = any(path == other or path.startswith(other + "/") for other in chosen if not os.path.islink(other))
        if os.path.lexists(path) and not covered:
            chosen.append(path)
    return chosen


def build(extra: list[str]) -> None:
    """Replace the root of this process's own mount namespace. Raises OSError."""
    paths = readable_paths(extra)
    os.umask(0o022)  # programs have users of their own
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=0755")
    os.mkdir("/tmp/old")
    os.chdir("/tmp")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    for path in [*paths, *DEVICES]:
        _show(path)
    os.mkdir("/tmp", 0o755)
    check(LIBC.umount2(b"/old", MNT_DETACH), "umount the old root")
    os.rmdir("/old")
    attributes = struct.pack("QQQQ", _ATTRIBUTES_RDONLY_NOSUID, 0, 0, 0)
    call("mount_setattr", _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))


def _show(path: str) -> None:
    """Make one file or folder of the old root visible in the new one."""
    source = "/old" + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, path, None, MS_BIND | MS_REC)
