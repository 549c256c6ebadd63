"""Pretraining: one model under several policies, side by side, on the same text."""

from .config import Config
from .loop import pretrain, resume
from .result import Result, Row

__all__ = ["Config", "Result", "Row", "pretrain", "resume"]
