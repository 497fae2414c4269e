"""Where numbers are rounded, and the only place that names dtypes.

The rounding contract is that of `jax_dflash/numerics.py`: matrix products accumulate in at least float32 and round
once; norms, RoPE, softmax and SwiGLU compute in at least float32 and round their result once; the residual add rounds
once; logits stay in the accumulation dtype. With a float64 model "at least float32" is float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from jax_dflash.config import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def pin_numerics() -> None:
    """No TF32 in float32 products, no bfloat16 partial sums in bfloat16 ones. Holds for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def as_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises InputError."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; pass one of {', '.join(DTYPES)}")
    return DTYPES[name]


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


def to_accum(x: Tensor) -> Tensor:
    """The exact value in the accumulation dtype."""
    return x.to(accum_dtype(x.dtype))


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the activation dtype: the only function that does, beside the operators that round once themselves
    (`linear`, `rms_norm`, `add`, attention)."""
    return x.to(dtype)


def to_device(x, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A numpy array or tensor as a tensor of that dtype on that device; numpy's bfloat16 goes through float32. numpy is
    copied: it may be a read-only view of another framework's array."""
    if not isinstance(x, Tensor):
        x = torch.tensor(x if x.dtype.kind in "fiu" else x.astype("float32"))
    return x.to(device, dtype)


def accum_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x [..., in]` by a torch-layout `weight [out, in]`, accumulated in and returned in at least float32."""
    accum = accum_dtype(x.dtype)
    if x.dtype == accum:
        return F.linear(x, weight)
    if x.is_cuda:  # the product of bfloat16 operands with a float32 result, without a float32 copy of the weight
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=accum).unflatten(0, x.shape[:-1])
    return F.linear(to_accum(x), to_accum(weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [..., in]` by a torch-layout `weight [out, in]`, plus a bias if there is one, rounded once."""
    return F.linear(x, weight, bias)


def to_numpy(x: Tensor):
    """A tensor as numpy; bfloat16 comes as float32, exactly."""
    return (to_accum(x) if x.is_floating_point() else x).cpu().numpy()


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """float32 numbers that travelled as int32."""
    return bits.contiguous().view(torch.float32)
