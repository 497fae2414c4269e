"""The shipped held-out text and the tokenizers of checkpoints. Plain Python: both frameworks use it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from jax_dflash.config import InputError

EXCERPTS = Path(__file__).parent / "assets" / "excerpts"


@cache
def tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer.json of a checkpoint folder. Raises InputError."""
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{path}: no such file; the target's folder needs its tokenizer")
    return Tokenizer.from_file(str(path))


def texts() -> dict[str, str]:
    """Every held-out excerpt by file name: Python source that the builtin pair was not trained on."""
    return {path.name: path.read_text() for path in sorted(EXCERPTS.glob("*.py.txt"))}


def prompts(directory: str | Path, count: int, lengths: Sequence[int]) -> list[list[int]]:
    """`count` prompts for a target: stretches of the excerpts from line starts, evenly spread, of `lengths` in turn."""
    encoder, sources = tokenizer(directory), list(texts().values())
    rows = []
    for i in range(count):
        source = sources[i % len(sources)]
        spread = (i // len(sources) + 1) / (count // len(sources) + 2)
        start = source.rfind("\n", 0, int(len(source) * spread)) + 1
        ids = encoder.encode(source[start:]).ids
        rows.append(ids[: lengths[i % len(lengths)]])
    return rows
