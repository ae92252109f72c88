"""Tests of environments of other packages, in an environment that has these packages."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "tests"), str(HERE / "tasksets")]  # episodes
# Worker processes, and the tool servers that verifiers starts, import tasksets by their names.
os.environ["PYTHONPATH"] = str(HERE / "tasksets")
