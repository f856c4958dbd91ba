"""docs/settings.md, made of the dataclass.

python -m tests.settings_page > docs/settings.md
"""

from __future__ import annotations

from dataclasses import fields
from textwrap import wrap

from mame_sd.config import DEFAULT_KEEP, DEFAULT_MLP_KEEP, MaMeConfig

HEAD = """# Settings

`python -m tests.settings_page` writes this page from `MaMeConfig`. The keywords of `apply_mame` and
`MaMeAttnProcessor` and `--config` of the commands share these names. `--config` takes a .json file
of settings, or a text such as `keep=0.4,fit_queries=32`. The most used have options of their own.

`keep` merges keys and values and fits the merged values, `tau` merges whole tokens as in the paper.
If neither is given, `keep` is {keep:g} and `mlp_keep` is {mlp_keep:g} in layers with enough work
([restoring](restoring.md#where-it-acts)).
"""
PARTS = {False: "With either method", True: "With `keep`"}


def page() -> str:
    """Return the page."""
    lines = [HEAD.format(keep=DEFAULT_KEEP, mlp_keep=DEFAULT_MLP_KEEP)]
    for keys_only, title in PARTS.items():
        lines += [f"## {title}", "", *_table(keys_only), ""]
    return "\n".join(lines)


def _table(keys_only: bool) -> list[str]:
    """Return a table of what each field does, and a list of further notes."""
    rows, more = ["| setting | default | what it does |", "|---|---|---|"], [""]
    for f in fields(MaMeConfig):
        if not f.init or f.metadata["keys_only"] != keys_only:
            continue
        shown = "" if f.default is None else f"`{f.default}`"
        rows.append(f"| `{f.name}` | {shown} | {f.metadata['help']} |")
        if f.metadata["about"]:
            text = f"- `{f.name}`: {f.metadata['about']}"
            more += wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    return rows + more


if __name__ == "__main__":
    print(page(), end="")
