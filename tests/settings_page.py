"""docs/settings.md, made of the dataclasses.

python -m tests.settings_page > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from textwrap import wrap

from mame_sd.config import STUDY, MaMeConfig, Study

HEAD = """# Settings

This page is made by `python -m tests.settings_page` from `MaMeConfig` and `Study`. The keywords of
`apply_mame` and `MaMeAttnProcessor`, the options of the commands and the files of `--config` share
these names. One option is called otherwise: `--mame-seed`, since `--seed` is the image's. The
`--size` of `tune` is in pixels.
"""
STUDY_HEAD = """## Study

What the paper's ablations vary. Nobody needs these to merge, for measurement chose each default
([method](method.md), [experiments](experiments.md)).

```python
apply_mame(pipe, study=Study(weights="pick"))
```
```bash
mame-sd generate --prompts demo --study weights=pick --study redraw=false
```

A file of settings holds them in a table of that name:
`{"keep": 0.5, "study": {"weights": "pick"}}`.
"""


def page() -> str:
    """The page."""
    top = [name for name in (f.name for f in fields(MaMeConfig)) if name not in STUDY]
    return "\n".join([HEAD, *_table(top), "", STUDY_HEAD, *_table(STUDY), ""])


def _table(names: Sequence[str]) -> list[str]:
    """A table of what each does, and a list of what is to know beyond that."""
    default, found = MaMeConfig(), {f.name: f for f in (*fields(MaMeConfig), *fields(Study))}
    rows, more = ["| setting | default | what it does |", "|---|---|---|"], [""]
    for name in names:
        value, metadata = getattr(default, name), found[name].metadata
        shown = "" if value is None else f"`{value}`"
        rows.append(f"| `{name}` | {shown} | {metadata['help']} |")
        if metadata["about"]:
            text = f"- `{name}`: {metadata['about']}"
            more += wrap(text, 120, subsequent_indent="  ", break_on_hyphens=False)
    return rows + more


if __name__ == "__main__":
    print(page(), end="")
