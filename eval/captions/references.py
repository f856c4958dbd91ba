"""References of captions in COCO's format: `images` with ids and files, `annotations` with
captions.

An entry of `images` may hold `things`: pairs of an object and its colour that a caption should
name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from mame_sd.errors import UserError, first_line


@dataclass(frozen=True)
class Pictures:
    """Pictures in the order of the file of references.

    Attributes:
        files: of each picture by its id.
        references: captions of each.
        things: (object, colour) of each; empty where the file names none.
    """

    files: dict[str, Path]
    references: dict[str, list[str]]
    things: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


def read_references(file: Path, folder: Path, num: int | None = None) -> Pictures:
    """The pictures of `folder` that the file describes, or the first `num`.

    Raises:
        UserError: a file or picture that isn't there, another format, a picture without captions.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        images = [(str(one["id"]), one) for one in content["images"]]
        captions = [(str(one["image_id"]), str(one["caption"])) for one in content["annotations"]]
    except OSError as error:
        raise UserError(f"--references {file}: {first_line(error)}; check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--references {file}: expected COCO's format, a JSON object with images (id,"
            f" file_name) and annotations (image_id, caption), got another ({error!r})"
        ) from error
    if num is not None and num < 1:
        raise UserError(f"--num: expected at least 1, got {num}; correct it")
    references: dict[str, list[str]] = {}
    for name, caption in captions:
        references.setdefault(name, []).append(caption)
    chosen = images[:num]
    files = {name: folder / str(one.get("file_name", name)) for name, one in chosen}
    for name, path in files.items():
        if not path.is_file():
            raise UserError(f"--data {folder}: expected the picture {path.name}, found none")
        if not references.get(name):
            raise UserError(
                f"--references {file}: expected a caption of each picture, found none of {name}"
            )
    if not files:
        raise UserError(f"--references {file}: expected pictures, found none")
    things = {
        name: [(str(a), str(b)) for a, b in one["things"]]
        for name, one in chosen
        if "things" in one
    }
    return Pictures(files, {name: references[name] for name in files}, things)
