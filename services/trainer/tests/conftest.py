"""Helpers of this folder are imported by both halves; see `processes`."""

import torch

torch.set_num_threads(1)
