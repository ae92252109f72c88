"""Tests of environments of other packages, in an environment that has these packages."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKSETS = [str(HERE / "tasksets"), str(HERE.parents[2] / "examples" / "verifiers_game")]
sys.path += [str(HERE.parent / "tests"), *TASKSETS]  # episodes
# Worker processes, and the tool servers that verifiers starts, import tasksets by their names.
os.environ["PYTHONPATH"] = os.pathsep.join(TASKSETS)
