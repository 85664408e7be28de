"""Random cases of bad bytes: each function draws one value from a ``random.Random``.

The quick tests use hypothesis's generator, which finds the smallest failing case. The long run uses
plain generators, with which a case costs microseconds.
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


def text(draw: Random, longest: int = 8) -> str:
    """A few characters from all of Unicode, most of them from its beginning."""
    ends = (0x80, 0x80, 0x500, 0x110000)
    return "".join(chr(draw.randrange(draw.choice(ends))) for _ in range(draw.randint(0, longest)))


def value(draw: Random, depth: int = 2) -> Any:
    """Any JSON value."""
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
    inner = [value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return inner if kind == 6 else {text(draw): item for item in inner}


def edited(draw: Random, sample: bytes) -> bytes:
    """The bytes with one to four changes: flipped, removed, inserted, repeated or truncated."""
    data = bytearray(sample)
    for _ in range(draw.randint(1, 4)):
        place, length = draw.randint(0, len(data)), draw.randint(1, 8)
        kind = draw.choice(("flip", "cut", "insert", "double", "end"))
        if kind == "flip" and place < len(data):
            data[place] ^= draw.randint(1, 255)
        elif kind == "cut":
            del data[place : place + draw.randint(1, 255)]
        elif kind == "insert":
            data[place:place] = draw.getrandbits(8 * length).to_bytes(length, "little")
        elif kind == "double":
            data[place:place] = data[place : place + draw.randint(1, 255)]
        elif kind == "end":
            del data[place:]
    return bytes(data)


def raw(draw: Random, sample: bytes) -> bytes:
    """The bytes edited, or sometimes entirely different bytes."""
    if draw.randrange(10):
        return edited(draw, sample)
    length = draw.randint(0, 64)
    return draw.getrandbits(8 * length + 1).to_bytes(length + 1, "little")[:length]


def replaced(draw: Random, tree: Any) -> Any:
    """The JSON value with a part replaced, removed or renamed."""
    if not isinstance(tree, dict | list) or not tree or not draw.randrange(20):
        return value(draw)
    tree = tree.copy()
    key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
    how = draw.choice(("deeper", "deeper", "deeper", "replace", "drop", "rename"))
    if how == "deeper" or (how == "rename" and isinstance(tree, list)):
        tree[key] = replaced(draw, tree[key])
    elif how == "replace":
        tree[key] = value(draw)
    elif how == "drop":
        del tree[key]
    else:
        tree[text(draw)] = tree.pop(key)
    return tree


def json_case(sample: bytes) -> Callable[[Random], bytes]:
    """Draws the JSON file with bytes edited, or with a value changed."""
    tree = json.loads(sample)

    def case(draw: Random) -> bytes:
        if not draw.randrange(3):
            return raw(draw, sample)
        return json.dumps(replaced(draw, tree)).encode("utf-8", "surrogatepass")

    return case


SECTIONS = ("model", "data", "objective", "optimizer", "schedule", "train", "preset", "x")
KEYS = (
    *("name", "lr", "p", "seed", "fraction", "betas", "epochs", "layers", "strength", "sites"),
    *("", "a.b", "batch_size", "length", "hidden_size", "momentum", "clip", "weight_decay", "k"),
)
NAMES = (*presets(), "nothing", None)
TOML = ("[[1]]", "{a=1}", "'''", "nan", "inf", "1_0", "0x1", "2026-01-01", '"\\u0000"', "[1,", "=")


def override(draw: Random) -> str:
    """A setting as ``--set`` takes it."""
    said = (lambda: draw.choice(TOML), lambda: str(value(draw, 0)), lambda: text(draw, 12))
    return f"{draw.choice(SECTIONS)}.{draw.choice(KEYS)}={draw.choice(said)()}"


def settings(draw: Random) -> dict[str, Any]:
    """Settings as in a TOML file."""

    def section() -> Any:
        if draw.randrange(4):
            return {draw.choice(KEYS): value(draw) for _ in range(draw.randint(0, 3))}
        return value(draw)

    return {draw.choice(SECTIONS): section() for _ in range(draw.randint(0, 3))}


def preset_case(draw: Random) -> tuple[str | None, dict[str, Any], list[str]]:
    """The name of a preset, settings that override it, and settings from the command line."""
    name = draw.choice(NAMES)
    return name, settings(draw), [override(draw) for _ in range(draw.randint(0, 2))]


COMMANDS = sorted(set(cli.commands()) - {"demo", "bench"})  # these work with no argument at all
WORDS = (
    *("--set", "--out", "--seed", "--json", "--resume", "--data-dir", "--split", "--model"),
    *("--data", "--objective", "--preset", "--scale", "--dry-run", "--seeds", "--jobs"),
    *("--prompt", "--words", "--top-k", "--temperature", "--value", "--help", "--", "-1"),
    *("awd-lstm", "analytic", "run", "text", "records", "..", "a", "nan", "1", "info", "get"),
    *("list", "x:y", "os:system", "demo"),
)


def line_case(draw: Random) -> list[str]:
    """A command and its arguments."""
    said = (lambda: draw.choice(WORDS), lambda: override(draw), lambda: text(draw, 6))
    chosen: Sequence[Callable[[], str]] = draw.choices(said, (4, 1, 1), k=draw.randint(0, 5))
    return [draw.choice(COMMANDS), *(say() for say in chosen)]
