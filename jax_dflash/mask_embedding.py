"""A mask row of its own that ships beside a drafter's weights. Plain Python, but for a `.pt`, which PyTorch opens.

The vector `[D]` stands in the place of `embed_tokens[mask_token_id]`; embedding scales treat it as that row. It comes as
`mask_embedding.safetensors` (tensor `embedding`) or as `mask_embedding.pt` (the tensor, or a dict with the key `embedding`),
of any shape with D elements. A `mask_token_id` beside it must be the configuration's: in a dict, in the metadata of a
safetensors file, or there a tensor of one integer.

A `.pt` is a pickle. Only PyTorch's restricted unpickler reads it (`torch.load(weights_only=True)`), which makes tensors and
plain values and calls nothing that the file names.
"""

import math
import os
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from jax_dflash.config import DraftConfig
from jax_dflash.keys import InputError, check_inside, show, show_name
from jax_dflash.stored import FLOAT_KINDS, INT_KINDS, Source, Stored, read_header

MASK_EMBEDDING = "mask_embedding"  # its canonical name
MASK_FILES = ("mask_embedding.safetensors", "mask_embedding.pt")
PARTS = ("embedding", "mask_token_id")
MAX_BYTES = 16 << 20  # of a file that holds one vector


def mask_files(directory: str | Path) -> list[Path]:
    """Those that a folder has, links that lead nowhere too."""
    return [path for name in MASK_FILES if os.path.lexists(path := Path(directory) / name)]


def read_mask_embedding(directory: str | Path, config: DraftConfig) -> Stored | None:
    """The vector `[D]` of a checkpoint folder under its canonical name, or None where there is none. Raises InputError."""
    files = mask_files(directory)
    if not files:
        return None
    if len(files) > 1:
        raise InputError(f"{files[1]}: {files[0].name} holds a mask row too; keep one of them")
    file = files[0]
    check_inside(file)
    if not file.is_file():
        raise InputError(f"{file}: not a file")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise InputError(f"{file}: {size} bytes, expected one vector in at most {MAX_BYTES}")
    if file.suffix == ".pt":
        stored, ids = _unpickled(file)
    else:
        stored, ids = _from_safetensors(file)
    for found in ids:
        if found != config.mask_token_id:
            raise InputError(
                f"{file}: mask_token_id is {show(found)}, the configuration's is {config.mask_token_id}; pass the pair that "
                "belongs together"
            )
    told = f"{file}: tensor embedding"
    if stored.kind not in FLOAT_KINDS:
        raise InputError(f"{told} is stored as {stored.kind}, expected one of {tuple(FLOAT_KINDS)}")
    D = config.geometry.hidden_size
    if math.prod(stored.shape) != D:
        raise InputError(f"{told} has shape {list(stored.shape)}, expected {D} elements, the drafter's hidden_size")
    return replace(stored, name=MASK_EMBEDDING, shape=(D,))


def check_mask_files(directory: str | Path, names: Collection[str]) -> None:
    """Refuse to save tensors of these names where a mask row would stay and be read with them. Raises InputError."""
    replaced = MASK_FILES[:1] if MASK_EMBEDDING in names else ()
    if stale := [file for file in mask_files(directory) if file.name not in replaced]:
        raise InputError(f"{stale[0]}: the mask row of another checkpoint; remove it, or save elsewhere")


def _check_parts(file: Path, names: Iterable[Any]) -> None:
    names = list(names)
    if "embedding" not in names:
        raise InputError(f"{file}: no tensor embedding; expected {' and perhaps '.join(PARTS)}")
    if unknown := [name for name in names if name not in PARTS]:
        shown = show_name(unknown[0]) if isinstance(unknown[0], str) else show(unknown[0])
        raise InputError(f"{file}: unclaimed {shown}; expected {' and perhaps '.join(PARTS)}")


def _from_safetensors(file: Path) -> tuple[Stored, list[Any]]:
    """The vector as it is stored, and every mask id that the file names."""
    tensors = {tensor.name: tensor for tensor in read_header(file)}
    _check_parts(file, tensors)
    with safe_open(file, framework="numpy") as handle:
        metadata = handle.metadata() or {}
    ids: list[Any] = []
    if (text := metadata.get("mask_token_id")) is not None:
        ids.append(int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text)
    if (tensor := tensors.get("mask_token_id")) is not None:
        if tensor.kind not in INT_KINDS or math.prod(tensor.shape) != 1:
            raise InputError(
                f"{file}: tensor mask_token_id is {tensor.kind} of shape {list(tensor.shape)}, expected one integer, "
                f"{' or '.join(INT_KINDS)}"
            )
        ids.append(int(Source(tensor).read().view(np.dtype(tensor.dtype))[0]))
    return tensors["embedding"], ids


def _unpickled(file: Path) -> tuple[Stored, list[Any]]:
    """As `_from_safetensors`, by PyTorch's restricted unpickler."""
    import torch

    try:
        with file.open("rb") as handle:
            is_zip = handle.read(4) == b"PK\x03\x04"  # as PyTorch tells it from its older format
        if is_zip:
            with zipfile.ZipFile(file) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
            if size > MAX_BYTES:  # entries may be packed, so a small file is no bound
                raise ValueError(f"{size} bytes when unpacked")
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken or hostile file makes the reader raise anything
        raise InputError(
            f"{file}: not to be read by torch.load(weights_only=True), and a pickle is opened by nothing else "
            f"({type(error).__name__}); save the vector as {MASK_FILES[0]}"
        ) from None
    if isinstance(found, torch.Tensor):
        found = {"embedding": found}
    if not isinstance(found, dict):
        raise InputError(f"{file}: holds a {type(found).__name__}, expected a tensor or a dict with the key embedding")
    _check_parts(file, found)
    ids = [] if found.get("mask_token_id") is None else [found["mask_token_id"]]
    ids = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_floating_point() else x for x in ids]
    vector = found["embedding"]
    if not isinstance(vector, torch.Tensor) or vector.layout != torch.strided or vector.device.type != "cpu":
        raise InputError(f"{file}: embedding is a {type(vector).__name__}, expected a dense tensor")
    dtype = str(vector.dtype).removeprefix("torch.")
    kind = next((kind for kind, (name, _) in FLOAT_KINDS.items() if name == dtype), dtype)
    # A few stored elements may stand for a tensor of any size: too many of them are never written out.
    data = (
        vector.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if vector.nbytes <= MAX_BYTES else b""
    )
    return Stored(file, "embedding", kind, tuple(vector.shape), 0, len(data), data), ids
