"""Broken values, as text and as files: each is drawn from a generator that is given."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

Draw = random.Random
LONG = 10 * 2**20
TEXTS = (
    "",
    " ",
    "a red key",
    "ключ",
    "\u202eyek",
    "e\u0301",
    "é",
    "🦊" * 40,
    "a\0b",
    "\ufeffkey",
    "x\u2028y",
    "a\x1b[2Jb",
    "<script>",
    "\udcff",
    "\ud83d",
    "../../escape",
    "/etc/passwd",
    "..",
    ".",
    ".hidden",
    "C:\\x",
    "a/b",
    "con",
    "nul.txt",
    "x" * 300,
    "ﬁ",
    "K",
    "%s{}$HOME`id`",
    "-n",
    "--help",
    "1e999",
    "NaN",
    "a\r\nb",
    "\t",
)
NUMBERS = (
    0,
    1,
    -1,
    7,
    8,
    64,
    65537,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    3.0,
    True,
    False,
)
RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    "[" * 100_000,
    "[" * 700 + "]" * 700,
    '{"a":' * 950 + "1" + "}" * 950,
    '{"a":' * 50_000,
    "1e-999",
    "00",
    "'a'",
)
KEYS = (
    "prompt",
    "caption",
    "id",
    "seed",
    "negative_prompt",
    "width",
    "height",
    "note",
    "",
    "PROMPT",
    "file",
    "\ud800",
    "__class__",
)


def any_value(draw: Draw, depth: int = 0) -> Any:
    """A JSON value of any type."""
    pick = draw.randrange(8 if depth < 3 else 5)
    if pick < 2:
        return draw.choice(TEXTS)
    if pick < 4:
        return draw.choice(NUMBERS)
    if pick == 4:
        return None
    if pick == 5:
        return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if pick == 6:
        return {draw.choice(KEYS): any_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    deep: Any = draw.choice(NUMBERS)
    for _ in range(draw.choice((5, 500))):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return deep


def as_json(draw: Draw, value: Any, raw: float = 0.1) -> bytes:
    """`value` as JSON text, now and then with a piece that no encoder writes instead of a value."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    if draw.random() < raw:
        mark = json.dumps("MARK")
        holder = dict(value) if isinstance(value, dict) else {"prompt": value}
        holder[draw.choice(list(holder) or ["prompt"])] = "MARK"
        text = json.dumps(holder).replace(mark, draw.choice(RAW), 1)
    return text.encode("utf-8", "surrogatepass")


def changed(draw: Draw, value: Any) -> Any:
    """`value` with one entry, at any depth, removed, added or replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        copy = dict(value)
        action = draw.randrange(8)
        if action == 0:
            del copy[key]
        elif action == 1:
            copy[draw.choice((*KEYS, "surprise"))] = any_value(draw)
        elif action < 5:
            copy[key] = changed(draw, copy[key])
        else:
            copy[key] = any_value(draw)
        return copy
    if isinstance(value, list) and value and draw.random() < 0.7:
        copy = list(value)
        place = draw.randrange(len(copy))
        copy[place] = changed(draw, copy[place])
        return copy[:place] if draw.random() < 0.1 else copy
    return any_value(draw)


def damaged(draw: Draw, data: bytes) -> bytes:
    """`data` after one accident on the way to disk, or none."""
    place = draw.randrange(len(data) + 1)
    return draw.choice(
        (
            *[lambda: data] * 16,
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: data.decode("utf-8", "replace").encode("utf-16-be"),
            lambda: data.decode("utf-8", "replace").encode("utf-32"),
            lambda: data.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xe9",
            lambda: data[:place] + b"\0" + data[place:],
            lambda: data[:place],
            lambda: data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :],
            lambda: data.replace(b"\n", b"\r\n"),
            lambda: data.replace(b"\n", b"\r"),
            lambda: data[:place] + b"\xed\xa0\x80" + data[place:],
            lambda: data[:place] + b"\xff\xfe" + data[place:],
            lambda: data + draw.randbytes(200),
            lambda: data + b"\n" + data,
            lambda: data[:place] + b"x" * LONG + data[place:],
            lambda: b"\n" * 100_000 + data,
            lambda: b"",
            lambda: draw.randbytes(draw.choice((1, 100, 5000))),
        )
    )()


def place_file(draw: Draw, folder: Path, name: str, data: bytes) -> Path:
    """`data` at `folder`/`name`: as a file mostly, else behind links, as a folder, or not there at
    all.
    """
    path = folder / name
    kind = draw.randrange(40)
    if kind == 0:
        path.mkdir(parents=True)
    elif kind == 1:
        path.symlink_to(path)
    elif kind == 2:
        path.symlink_to(folder / "nowhere")
    elif kind == 3:
        (folder / "real").write_bytes(data)
        path.symlink_to(folder / "real")
    elif kind == 4:
        path.symlink_to(folder)
    elif kind == 5:
        path = folder / draw.choice(
            (
                name + ".bak",
                name.rpartition(".")[0],
                name.upper(),
                "\udcff" + name,
                "a\nb" + name,
                "x" * 300 + name,
            )
        )
        with contextlib.suppress(OSError):
            path.write_bytes(data)
    elif kind != 6:
        path.write_bytes(data)
    return path


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
