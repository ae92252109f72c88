"""Tests of environments that OpenEnv's servers serve, in an environment that has OpenEnv."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # model_endpoint, episodes
