"""What tells a federation from every other, small enough to be kept with a run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from kinfolk.data.federation import Federation


def fingerprint(federation: Federation) -> dict[str, Any]:
    """Clients, classes and shape of an input, and the sum (SHA-256) of all samples, labels and who holds them.

    Every byte is read: about 1 GiB a second, which training takes many times over.
    """
    digest = hashlib.sha256()
    for name, part in federation.parts().items():
        for what in ("x", "y", "starts", "sizes", "domains"):
            _add(digest, f"{name}.{what}", getattr(part, what))
    for name, clusters in {"clients": federation.clusters, **federation.outside}.items():
        _add(digest, f"{name}.clusters", clusters)
    return {**shape(federation), "sum": digest.hexdigest()}


def shape(federation: Federation) -> dict[str, Any]:
    """What of the fingerprint costs nothing."""
    return {
        "clients": federation.clients,
        "classes": int(federation.classes),
        "input_shape": list(federation.input_shape),
    }


def _add(digest: Any, name: str, tensor: Tensor | None) -> None:
    if tensor is None:
        return
    # Where one tensor ends and the next begins has to be in the sum, or labels could pass for samples.
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    if tensor.numel():
        # Not reshape(-1): with a single element torch may keep a stride that `view` then refuses.
        flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
        digest.update(flat.view(torch.uint8).numpy().data)
