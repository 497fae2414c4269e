"""The CPython standard library's source as a corpus: which files, which are held out, and the shipped excerpts.

    python experiments/stdlib_corpus.py OUT.npz [--excerpts DIR]

Files whose sha256 begins with a byte below HELD_OUT are never trained on; the excerpts come from those alone.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import numpy as np

HELD_OUT = 14  # of 256: about 5% of the files
SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "idle_test"}
EXCERPT_BYTES, TOTAL_BYTES = 12_000, 200_000


def sources() -> list[tuple[str, str, bytes]]:
    """(path in the library, sha256, text) of every module, tests and third-party packages left out, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not SKIP & set(p.relative_to(root).parts[:-1]))
    texts = [(p.relative_to(root).as_posix(), p.read_bytes()) for p in files]
    return [(name, hashlib.sha256(text).hexdigest(), text) for name, text in texts if text.strip()]


def is_held_out(sha256: str) -> bool:
    return int(sha256[:2], 16) < HELD_OUT


def write_excerpts(held_out: list[tuple[str, str, bytes]], directory: Path) -> list[dict]:
    """The beginning of each held-out module up to a line end; the rows of the index."""
    directory.mkdir(parents=True, exist_ok=True)
    rows, total = [], 0
    for name, sha256, text in held_out:
        if len(text) < 2_000 or total >= TOTAL_BYTES:
            continue
        part = text[:EXCERPT_BYTES]
        part = part[: part.rfind(b"\n") + 1]
        file = name.replace("/", "__") + ".txt"
        (directory / file).write_bytes(part)
        total += len(part)
        rows.append({"file": file, "module": name, "sha256": sha256, "bytes": len(part)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--excerpts", type=Path)
    args = parser.parse_args()
    files = sources()
    train = [text for _, sha256, text in files if not is_held_out(sha256)]
    held_out = [row for row in files if is_held_out(row[1])]
    # 256 separates documents: a byte is a token, so a document's end needs an id past 255.
    tokens = np.concatenate([np.append(np.frombuffer(text, np.uint8).astype(np.uint16), 256) for text in train])
    np.savez_compressed(args.out, tokens=tokens)
    rows = write_excerpts(held_out, args.excerpts) if args.excerpts else []
    python = sys.version.split()[0]
    if rows:
        (args.excerpts / "index.json").write_text(json.dumps({"python": python, "files": rows}, indent=1) + "\n")
    result = {
        "job": "stdlib_corpus",
        "python": python,
        "train_files": len(train),
        "tokens": len(tokens),
        "held_out_files": len(held_out),
        "excerpts": len(rows),
        "excerpt_bytes": sum(row["bytes"] for row in rows),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
