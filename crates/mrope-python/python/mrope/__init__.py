"""Rotary embeddings (RoPE, MRoPE) for training: fused forward and backward under PyTorch tensors.

``mrope.torch`` has the operation and its angles, ``mrope.drop_in`` torch_npu's operators with a
gradient, :func:`patch` puts it into models of transformers.
"""

from ._audit import Finding, Report, audit
from ._native import VERSION as __version__
from ._patch import patch, unpatch
from ._spec import RotarySpec

__all__ = ["Finding", "Report", "RotarySpec", "__version__", "audit", "patch", "unpatch"]
