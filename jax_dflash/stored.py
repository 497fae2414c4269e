"""What a checkpoint's safetensors files hold: headers without values, and values piece by piece. Plain Python and numpy.

Files come from strangers. The safetensors library checks a header (sizes, offsets, overlaps, the file's length) before
anything here believes it; nothing here is unpickled. Values are read, not mapped: a mapped file would count as memory
beside the arrays made of it.
"""

import io
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from jax_dflash.keys import InputError, check_inside, read_json, show

# safetensors' name of a dtype: everybody else's, and its bytes
FLOAT_KINDS = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4), "F64": ("float64", 8)}
INT_KINDS = {"I64": ("int64", 8), "I32": ("int32", 4)}
KINDS = FLOAT_KINDS | INT_KINDS
ALIGNMENT = 64
MAX_HEADER = 100 << 20
PICKLES = ("pytorch_model.bin", "model.bin", "model.pt", "pytorch_model.bin.index.json", "pytorch_model.pt")

Array = TypeVar("Array")


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: `kind` is safetensors' name of its dtype, its bytes begin at `start`. `data` holds them where
    the file is not one to seek in."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    data: bytes | None = None

    @property
    def dtype(self) -> str:
        """Its dtype by the name that numpy with ml_dtypes, JAX and PyTorch share."""
        return KINDS[self.kind][0]

    def open(self) -> BinaryIO:
        """Its file, or `data`, in which `start` counts."""
        return self.file.open("rb") if self.data is None else io.BytesIO(self.data)

    def all_finite(self, piece: int = 1 << 22) -> bool:
        """Whether no value is infinite or NaN, by the exponent's bits, in pieces of bounded memory."""
        size = FLOAT_KINDS[self.kind][1]
        exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}[self.kind]
        with self.open() as handle:
            handle.seek(self.start)
            for at in range(0, self.num_bytes, piece):
                bits = np.frombuffer(handle.read(min(piece, self.num_bytes - at)), f"<u{size}")
                if ((bits & exponent) == exponent).any():
                    return False
        return True


def checkpoint_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index or the one `model.safetensors`. Raises InputError."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: no weight_map; expected tensor names and their files")
        if bad := [name for name in weight_map.values() if not _is_file_name(name)]:
            raise InputError(f"{index}: weight_map names {show(bad[0])}; expected files of the same folder")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        check_inside(file)
        if not file.is_file():
            pickled = [name for name in PICKLES if (directory / name).exists()]
            hint = f"; {pickled[0]} is a pickle, which is never opened: convert it" if pickled else ""
            raise InputError(f"{file}: no such file; a checkpoint is config.json and model.safetensors{hint}")
    return files


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name != ".." and name.isprintable() and 0 < len(name) < 200


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name stands twice in the header")
    return entries


def read_header(file: Path) -> list[Stored]:
    """The tensors of a safetensors file, by its header alone. Raises InputError."""
    try:
        with safe_open(file, framework="numpy") as handle:
            names = set(handle.keys())
        with file.open("rb") as handle:
            (size,) = struct.unpack("<Q", handle.read(8))
            if size > MAX_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(handle.read(size), object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        if set(header) != names:
            raise ValueError("a header that two readers read differently")
        return [
            Stored(
                file, name, entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]  # fmt: skip
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: not a readable safetensors file ({reason})") from None


def stored_tensors(directory: str | Path) -> list[Stored]:
    """Every tensor of a checkpoint folder. Raises InputError."""
    return [tensor for file in checkpoint_files(directory) for tensor in read_header(file)]


@dataclass(frozen=True)
class Source:
    """Where a canonical tensor comes from: a stored one, or some of its rows."""

    stored: Stored
    rows: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.stored.shape
        return (self.rows[1] - self.rows[0], *self.stored.shape[1:])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * KINDS[self.stored.kind][1]

    def read(self) -> np.ndarray:
        """Its bytes, row-major and little-endian, in memory aligned so that JAX on a CPU need not copy them. Raises
        InputError."""
        row = 0 if self.rows is None else self.rows[0]
        start = self.stored.start + row * math.prod(self.shape[1:]) * KINDS[self.stored.kind][1]
        room = np.empty(self.num_bytes + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        raw = room[first : first + self.num_bytes]
        with self.stored.open() as handle:
            handle.seek(start)
            if handle.readinto(raw.data) < self.num_bytes:
                raise InputError(f"{self.stored.file}: the file has become shorter while it was read")
        return raw


def read_tensors(
    sources: dict[str, Source], convert: Callable[[np.ndarray, str, tuple[int, ...]], Array]
) -> dict[str, Array]:
    """The values of a table of sources, in its order, made from (bytes, dtype, shape) by `convert`. Largest first: at most
    the last and smallest one is held twice beside all others."""
    by_size = sorted(sources, key=lambda name: -sources[name].num_bytes)
    values = {name: convert(sources[name].read(), sources[name].stored.dtype, sources[name].shape) for name in by_size}
    return {name: values[name] for name in sources}
