"""Helpers of training programs."""

from .ptable import PTable

__all__ = ["PTable"]
