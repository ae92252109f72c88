"""Loads what a user names in a Python file, "FILE.py:NAME": reward functions, rows, environments, callbacks, schedules;
and how a package is installed.

It imports little, since worker processes load it.
"""

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_DISTRIBUTIONS = {
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "jwt": "pyjwt",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Well-known packages whose names are not those of their modules."""


def install_command(*packages: str) -> str:
    """Return the shell command that installs packages into this process's environment, for error messages.

    In an environment of a checkout it is `quartet env add`, which keeps them there when the environment is recreated.
    """
    environment, names = Path(sys.prefix), " ".join(packages)
    if (environment / "quartet-stamp.json").exists():
        return f"quartet env add {environment.name} {names}"
    if find_spec("pip"):
        return f"{sys.executable} -m pip install {names}"
    return f"uv pip install --python {sys.executable} {names}"


_LONGEST_TEXT, _MOST_CAUSES = 100_000, 20
_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")


def in_a_file(value: str) -> bool:
    """Return whether a value is a function, or class, in a Python file."""
    return bool(_FUNCTION.fullmatch(value))


def takes_arguments(path: str) -> bool:
    """Return whether `path`, "FILE.py:NAME", names a function with arguments, by the file's text; it is not run."""
    file, _, name = path.rpartition(":")
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(rf"^(async[ \t]+)?def[ \t]+{name}[ \t]*\(\s*[^)\s]", text, re.MULTILINE) is not None


class FileError(Exception):
    """The file cannot be loaded, or does not have what is named."""


def load_callable(path: str) -> Callable[..., Any]:
    """Return the function, class or other callable that `path`, "FILE.py:NAME", names. A process runs a file once.

    Raises:
        FileError: there is no such file, it raises, or it has no such callable.
    """
    file, _, name = path.rpartition(":")
    module = _module_of(file)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")
        ]
        raise FileError(f"'{file}' has no function '{name}'; it has: {', '.join(own) or 'none'}")
    return found


def _module_of(file: str) -> ModuleType:
    path = Path(file).resolve()
    # By its own name, so that what it defines can be pickled, unless that would hide another module.
    name = path.stem if _file_of(path.stem) in (None, str(path)) else f"quartet_file_{path.stem}"
    if _file_of(name) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileError(f"there is no file '{file}'")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that it can import modules beside it
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a SystemExit of the file must not end this process
        del sys.modules[name]
        what = describe(error, file)
        raise FileError(f"'{file}' {what['reason']} ({what['place']})") from error
    return module


def _file_of(name: str) -> str | None:
    """Return the file of a module that is loaded, "" for one without a file; None if there is no such module."""
    return getattr(sys.modules[name], "__file__", None) or "" if name in sys.modules else None


def describe(error: BaseException, file: str) -> dict[str, str]:
    """Return what code of a user's file raised: the reason, the place in the file, and the traceback."""
    _shorten(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(Path(file).resolve())] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    return {
        "reason": f"raised {type(error).__name__}: {error}{_installing(error)}",
        "place": place,
        "traceback": "".join(traceback.format_exception(error))[-4000:],
    }


def _shorten(error: BaseException | None) -> None:
    """Shorten an exception's long arguments, and its causes': Python takes seconds to make text of 100 MB, twice."""
    for _ in range(_MOST_CAUSES):  # they may be a circle
        if error is None:
            return
        error.args = tuple(each[:_LONGEST_TEXT] if isinstance(each, str | bytes) else each for each in error.args)
        error = error.__cause__ or error.__context__


def _installing(error: BaseException) -> str:
    """Return how to install the package whose import failed; "" if it was another error."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None or isinstance(cause, ModuleNotFoundError):
            break
        cause = cause.__cause__
    package = (isinstance(cause, ModuleNotFoundError) and cause.name or "").partition(".")[0]
    if not package or package in sys.modules or package in sys.stdlib_module_names:
        return ""
    return f"; if it is a package, install it: {install_command(_DISTRIBUTIONS.get(package, package))}"
