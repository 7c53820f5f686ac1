"""Frames: how the Query and Key matrices start.

All kinds are functions of the same Gaussian draw Z (d_model x d_model, rows grouped by head), so that
arms with one seed differ only in what the kind does to Z:

    normal       0.02 Z                        every other matrix's scale; attention logits of std 0.2 at d = 512
    matched      Z / sqrt(d_model)             the scale of an orthonormal row, without orthogonality
    orthogonal   per head: QR of its block     d_head orthonormal rows per head, signs fixed by diag(R)
    global       QR of the whole of Z          one orthogonal matrix; any head's rows are orthonormal too
    shared       orthogonal, of layer 0's Z    one frame for all layers, stored once
    sliced       rows of the identity          never drawn: attention takes slices of its input (oelm.model.attention);
                                               layers below `sliced_from` are orthogonal
"""

import hashlib
import math

import torch
from torch import Tensor

from oelm.config import INIT_STD


def draw_frame(kind: str, num_heads: int, d_model: int, layer: int, role: str, seed: int) -> Tensor:
    """The start value of one layer's Q or K matrix (`role`), float32, a pure function of its arguments."""
    z = gaussian((d_model, d_model), seed, f"blocks.{layer}.attention.{role}.weight").double()
    match kind:
        case "normal":
            frame = z * INIT_STD
        case "matched":
            frame = z / math.sqrt(d_model)
        case "orthogonal" | "shared" | "sliced":
            heads = z.view(num_heads, d_model // num_heads, d_model)
            frame = orthonormal_rows(heads).reshape(d_model, d_model)
        case "global":
            frame = orthonormal_rows(z)
        case _:
            raise ValueError(f"unknown kind of frame: {kind}")
    return frame.float()


def orthonormal_rows(blocks: Tensor) -> Tensor:
    """Orthonormalise the rows of each (..., rows, columns) block by QR, with a positive diagonal of R.

    The sign rule makes the factor unique and, for a Gaussian block, uniformly distributed.
    """
    q, r = torch.linalg.qr(blocks.mT, mode="reduced")
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    return (q * signs.unsqueeze(-2)).mT


def gaussian(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Standard normal draw of the tensor called `name`: each has its own generator, so arms share the rest."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)
