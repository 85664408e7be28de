"""Random cases of bad bytes: each function draws one case with a ``random.Random``.

The quick tests pass hypothesis's ``Random``, which shrinks a failing case. The long campaign passes a
plain one, with which a case takes microseconds.
"""

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from undrop.lab import cli
from undrop.lab.train import presets

NASTY = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-300, 5e-324, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "..", "/etc/passwd", "$tensor", "$items", "$tuple", "\x00", "\ud800", "1e999", "nan"),
    *(
        "[" * 2000,
        "a" * 300,
        "<script>",
        "é",
        [],
        {},
        [[]],
        {"$tensor": "/"},
        {"$items": [[{}, 1]]},
    ),
)


def text(draw: Random, max_length: int = 8) -> str:
    """Return a few characters from all of Unicode, most of them with small code points."""
    limits = (0x80, 0x80, 0x500, 0x110000)
    length = draw.randint(0, max_length)
    return "".join(chr(draw.randrange(draw.choice(limits))) for _ in range(length))


def value(draw: Random, depth: int = 2) -> Any:
    """Return any JSON value."""
    kind = draw.randrange(8 if depth else 6)
    if kind < 2:
        return draw.choice(NASTY)
    if kind == 2:
        return draw.randint(-2, 2)
    if kind == 3:
        return draw.getrandbits(draw.randint(1, 80)) - 2**40
    if kind == 4:
        return struct.unpack("<d", draw.getrandbits(64).to_bytes(8, "little"))[0]
    if kind == 5:
        return text(draw)
    items = [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return items if kind == 6 else {text(draw): item for item in items}


def edit_bytes(draw: Random, sample: bytes) -> bytes:
    """Return the bytes with one to four changes: flipped, removed, inserted, repeated or truncated."""
    data = bytearray(sample)
    for _ in range(draw.randint(1, 4)):
        start, length = draw.randint(0, len(data)), draw.randint(1, 8)
        kind = draw.choice(("flip", "cut", "insert", "double", "end"))
        if kind == "flip" and start < len(data):
            data[start] ^= draw.randint(1, 255)
        elif kind == "cut":
            del data[start : start + draw.randint(1, 255)]
        elif kind == "insert":
            data[start:start] = draw.getrandbits(8 * length).to_bytes(length, "little")
        elif kind == "double":
            data[start:start] = data[start : start + draw.randint(1, 255)]
        elif kind == "end":
            del data[start:]
    return bytes(data)


def raw(draw: Random, sample: bytes) -> bytes:
    """Return the bytes with changes, or sometimes entirely different bytes."""
    if draw.randrange(10):
        return edit_bytes(draw, sample)
    length = draw.randint(0, 64)
    return draw.getrandbits(8 * length + 1).to_bytes(length + 1, "little")[:length]


def edit_json(draw: Random, tree: Any) -> Any:
    """Return a JSON value with a part replaced, removed or renamed."""
    if not isinstance(tree, dict | list) or not tree or not draw.randrange(20):
        return value(draw)
    tree = tree.copy()
    key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
    kind = draw.choice(("deeper", "deeper", "deeper", "replace", "drop", "rename"))
    if kind == "deeper" or (kind == "rename" and isinstance(tree, list)):
        tree[key] = edit_json(draw, tree[key])
    elif kind == "replace":
        tree[key] = value(draw)
    elif kind == "drop":
        del tree[key]
    else:
        tree[text(draw)] = tree.pop(key)
    return tree


def json_case(sample: bytes) -> Callable[[Random], bytes]:
    """Return a function that draws the JSON file with changed bytes or with a changed value."""
    tree = json.loads(sample)

    def case(draw: Random) -> bytes:
        if not draw.randrange(3):
            return raw(draw, sample)
        return json.dumps(edit_json(draw, tree)).encode("utf-8", "surrogatepass")

    return case


SECTIONS = ("model", "data", "objective", "optimizer", "schedule", "train", "preset", "x")
KEYS = (
    *("name", "lr", "p", "seed", "fraction", "betas", "epochs", "layers", "strength", "sites"),
    *("", "a.b", "batch_size", "length", "hidden_size", "momentum", "clip", "weight_decay", "k"),
)
NAMES = (*presets(), "nothing", None)
TOML = ("[[1]]", "{a=1}", "'''", "nan", "inf", "1_0", "0x1", "2026-01-01", '"\\u0000"', "[1,", "=")


def override(draw: Random) -> str:
    """Return a setting in the form that ``--set`` takes."""
    values = (lambda: draw.choice(TOML), lambda: str(value(draw, 0)), lambda: text(draw, 12))
    return f"{draw.choice(SECTIONS)}.{draw.choice(KEYS)}={draw.choice(values)()}"


def settings(draw: Random) -> dict[str, Any]:
    """Return settings as a TOML file contains them."""

    def section() -> Any:
        if draw.randrange(4):
            return {draw.choice(KEYS): value(draw) for _ in range(draw.randint(0, 3))}
        return value(draw)

    return {draw.choice(SECTIONS): section() for _ in range(draw.randint(0, 3))}


def preset_case(draw: Random) -> tuple[str | None, dict[str, Any], list[str]]:
    """Return the arguments of ``configure``: a preset, settings, and overrides from the command line."""
    name = draw.choice(NAMES)
    return name, settings(draw), [override(draw) for _ in range(draw.randint(0, 2))]


COMMANDS = sorted(
    set(cli.commands()) - {"demo", "bench"}
)  # without arguments, these two start to work
WORDS = (
    *("--set", "--out", "--seed", "--json", "--resume", "--data-dir", "--split", "--model"),
    *("--data", "--objective", "--preset", "--scale", "--dry-run", "--seeds", "--jobs"),
    *("--prompt", "--words", "--top-k", "--temperature", "--value", "--help", "--", "-1"),
    *("awd-lstm", "analytic", "run", "text", "records", "..", "a", "nan", "1", "info", "get"),
    *("list", "x:y", "os:system", "demo"),
)


def line_case(draw: Random) -> list[str]:
    """Return a command and its arguments."""
    words = (lambda: draw.choice(WORDS), lambda: override(draw), lambda: text(draw, 6))
    chosen: Sequence[Callable[[], str]] = draw.choices(words, (4, 1, 1), k=draw.randint(0, 5))
    return [draw.choice(COMMANDS), *(word() for word in chosen)]
