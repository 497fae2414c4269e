"""Checkpoints by name from the Hugging Face hub, through huggingface_hub: its cache, its resume, its progress bars."""

import re
from pathlib import Path

from jax_dflash.keys import InputError

# What a checkpoint is made of. Nothing that could be executed is fetched, but for the one pickle that has a meaning: without
# it a drafter with a mask row of its own would be another function. It is opened as `mask_embedding.py` says.
FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding.pt", "tokenizer.json",
    "tokenizer_config.json",
)  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a path that exists, or `org/name` from the hub's cache, fetched where it is not there
    (HF_HUB_OFFLINE=1 never asks the network). `revision` is a branch, tag or commit. Raises InputError in one line."""
    path = Path(name)
    if path.exists() or not NAME.fullmatch(str(name)):
        if revision is not None:
            raise InputError(f"{name}: a folder has no revisions; pass org/name, or no --revision")
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=list(FILES)))
    except Exception as error:
        # The hub's client raises its own, its transport's and the system's errors; all mean that it is not to be had.
        reason = next(iter(str(error).split("\n")), "").strip() or type(error).__name__
        at = f" at revision {revision}" if revision else ""
        raise InputError(f"{name}{at}: no such folder, and not to be had from the hub ({reason})") from None
