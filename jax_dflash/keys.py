"""JSON files from strangers, read key by key: every complaint names the file and the key. Plain Python."""

import json
import math
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20
MAX_INT = 2**31 - 1  # positions, ids and sizes are int32 in both frameworks
REQUIRED = object()


class InputError(ValueError):
    """Something the user passed cannot be used; the message is one line that says what to do.

    The command line prints the message alone and exits with 2.
    """


def show(value: Any) -> str:
    """A value from a file, short enough for an error and on one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def show_name(name: str) -> str:
    """A tensor's name as it stands, or quoted where it could break a line or a terminal."""
    return name if name.isprintable() and len(name) <= 120 else show(name)


class Keys:
    """A JSON object read by dotted keys. A key may have several places, the first that is not null counts; null means
    that the key is absent."""

    def __init__(self, raw: dict, source: str):
        self.raw, self.source = raw, source

    def error(self, what: str) -> InputError:
        return InputError(f"{self.source}: {what}")

    def _at(self, path: str) -> Any:
        value = self.raw
        walked = ""
        for part in path.split("."):
            if value is None:
                return None
            if not isinstance(value, dict):
                raise self.error(f"key {walked!r} is {show(value)}, expected an object")
            value, walked = value.get(part), f"{walked}.{part}".lstrip(".")
        return value

    def find(self, *paths: str) -> tuple[str, Any]:
        """The first place that holds something and what it holds; the first place and None where none does."""
        for path in paths:
            if (value := self._at(path)) is not None:
                return path, value
        return paths[0], None

    def get(self, paths: str | tuple[str, ...], kind: type, default: Any = REQUIRED) -> Any:
        """The value of a key, of exactly this type; without a default the key is obligatory."""
        paths = (paths,) if isinstance(paths, str) else paths
        path, value = self.find(*paths)
        if value is None:
            if default is REQUIRED:
                others = f", and so is {' and '.join(map(repr, paths[1:]))}" if len(paths) > 1 else ""
                raise self.error(f"key {path!r} is missing{others}; add it to the configuration")
            return default
        if type(value) is int and abs(value) > (MAX_INT if kind is int else 2**63):
            raise self.error(f"key {path!r} is out of any range; expected {kind.__name__}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise self.error(f"key {path!r} is {show(value)}, expected {kind.__name__}")
        return value

    def positive(self, paths: str | tuple[str, ...], default: Any = REQUIRED, kind: type = int) -> Any:
        """As `get`; a number that is there must be more than 0."""
        value = self.get(paths, kind, default)
        if value is not None and value <= 0:
            path, _ = self.find(*((paths,) if isinstance(paths, str) else paths))
            raise self.error(f"key {path!r} is {value}, expected more than 0")
        return value


def check_inside(file: Path) -> None:
    """Refuse a link out of its folder, other than into the blobs of a Hugging Face cache. Raises InputError."""
    try:
        folder, real = file.parent.resolve(), file.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{file}: a link that leads nowhere ({error})") from None
    cached = folder.parent.name == "snapshots" and real.parent == folder.parent.parent / "blobs"
    if real.parent != folder and not cached:
        raise InputError(f"{file}: a link out of its folder, to {real}; put the file itself there")


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises InputError naming the file."""
    check_inside(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a file")
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise InputError(f"{path}: {size} bytes, expected a JSON file of at most {MAX_JSON_BYTES}")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw
