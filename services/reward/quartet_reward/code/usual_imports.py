"""Names that programs take for granted, as those for LeetCode do. None of them hides a builtin."""

import bisect
import builtins
import collections
import copy
import datetime
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import statistics
import string
import sys
import typing
from typing import Any

_WHOLE = (typing, operator, math, itertools, functools, heapq, bisect, collections, string)
_MODULES = (*_WHOLE, copy, datetime, json, random, re, statistics, sys)


def _names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for module in _WHOLE:  # later ones win
        names.update({name: vars(module)[name] for name in module_names(module) if not hasattr(builtins, name)})
    return names | {module.__name__: module for module in _MODULES}


def module_names(module: Any) -> list[str]:
    """Return the public names of a module: those of its `from … import *`."""
    return list(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))


NAMES = _names()
