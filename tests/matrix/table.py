"""The matrix as docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Sequence

from tests.matrix import (
    backends,
    caches,
    diffusers_tests,
    features,
    tools,
    transformers,
    two_denoisers,
    unets,
)
from tests.matrix.markdown import layers
from tests.matrix.models import sweep
from tests.matrix.rows import Row

HEAD = """# Compatibility

Each row is a test over real diffusers classes at tiny size (`tests/matrix/`, run by
`tests/test_matrix.py`). `python -m tests.matrix --sweep` runs all of them and those of the tables
below; `make test` runs one of each kind. For a row that merges it checks:

- Exactly the expected layers merge, to half of their keys by `keep` or of their tokens by `tau`,
  and no other module sees another input.
- `tau=1`, which merges nothing, equals the unmerged output to rounding (without a feature).
- After `remove_mame` the output is bit-equal to before.
- A feature gives the same output whether it is switched on before `apply_mame` or after it. It
  leaves no trace when it is switched off.
- What was saved while it merged loads, gives the unmerged output bit by bit, and merges as before:
  text to image, ControlNet, SDXL, Flux, Wan and Z-Image.

Inpainting, T2I-Adapters and the refiner run the UNets of these rows. Other LoRAs, schedulers and
switches of the autoencoder change nothing that merging sees.

*Layers* counts the layers that merge in the tiny model, by their tokens: `3 of 256, 4 of 64` are 3
layers of 256 tokens and 4 layers of 64.

*One-liner* is `set_attn_processor(MaMeAttnProcessor(...))`, and says what becomes of it, where that
was looked at:

- *same*: it gives what `apply_mame` gives with `redraw=False, share_guidance_plan=False`. A
  processor sees neither steps nor latents.
- *error*: an error tells to use `apply_mame`.
- *replaced*: the feature puts its own processor there, silently. Merging ends.
- *reset*: the feature sets it to default settings.
- *needs `size`*: the image is not square. A processor sees no height and width.
- *none*: the model has no `set_attn_processor`.
- *nothing merges*: the output stays as it was, and `report()` raises.
- *not on perturbed layers*: PAG perturbs some layers, and replaces their processor during a call.

*Keys merge after rotation*: rotary positions have turned them before.

This page is printed by `python -m tests.matrix`.
"""
CACHES = f"""## On top of caches

Each cell is a test of the two together over a run of {caches.STEPS} steps
(`tests/matrix/caches.py`). Switched on in either order they give the same bits, in a second run
too. Switching one off leaves what the other gives alone. SDXL, Stable Diffusion 3.5, Flux
Kontext and LTX-Video have the blocks of a row here. Other models are not looked at.

A cell says in how many of the {caches.STEPS} steps a merging layer computes at all. In the others
the cache has the answer, and merging saves nothing. The settings are the test's; yours decide how
many steps are cached. A letter marks a cache that fails without any of our code, which is tested
too. Below the table stands why.
"""
OWN_MODELS = """Caches that work on models of their own, tested alike:
"""
BACKENDS = """## In front of other attention kernels

Keys merge before the kernel that `set_attention_backend` chose, before `apply_mame`, after it or
while merging is on. Each cell says what the kernel is given: merged keys and values, and where it
takes numbers to be added to the logits, the sizes of groups; to others the keys carry them.
`report()` names the kernel.
*PyTorch's*: diffusers calls `scaled_dot_product_attention` there, whatever is set. PyTorch's own
kernel and flex run for real in the test. For the others stand kernels in that check what they are
given. All of this holds under `torch.compile` and in an export, and for kernels that are registered
later (`tests/diffusion/test_kernels.py`).
"""
TOOLS = """## Tools and errors

Wan 2.2 has two transformers. Each check of it puts the tool on both.
"""
SWEEP = """## Every denoiser of diffusers

These are all classes of the installed diffusers that may denoise, at tiny size and with images that
are not square. `tests/test_models.py` checks for each:

- Its merged keys and fitted values are those of a float64 loop, after rotation. Text and references
  are as they were.
- The tokens are where its family says. The test changes one slice of the latents along each axis,
  then one token of the text: exactly the keys that the family names move. UNets are left out, for
  convolutions spread a change.
- After `remove_mame` the output is bit-equal to before.

*`tau` too* says whether `tau`, which merges whole tokens, merges the same layers. Otherwise it
leaves them alone, as `report()` tells. *kernels* says in front of which attention kernels keys
merge, whichever diffusers' dispatcher is set to: PyTorch's own, flex, and stand-ins for sage, flash
and xformers. *all*: each of them is given merged keys. *no mask*: these refuse the model's mask,
merged or not. *PyTorch's*: the model calls `scaled_dot_product_attention` itself, whatever is set.

Where attention is linear or goes over blocks of keys, a test shows that no softmax goes over the
image. These tables are written by `python -m tests.matrix --sweep`.

`references=` merges the reference images of edits with Flux Kontext, Flux 2, Qwen-Image-Edit,
LongCat-Image-Edit, Bria FIBO Edit and JoyImage. Those of Qwen-Image 2.1 and OmniGen stand amid the
prompt, and stay unmerged. So do those of Bria FIBO 2, Flux 3 and Z-Image. Where a batch's captions
differ in length, Lumina 2 has each sample's image at another place. Such calls stay unmerged, and
`report()` says so.
"""


CHECKS = [*tools.CHECKS, *two_denoisers.CHECKS]


def rows_table(first: str, rows: Sequence[Row]) -> list[str]:
    lines = [f"| {first} | layers | one-liner | note |", "|---|---|---|---|"]
    for row in rows:
        one_liner = row.one_liner or row.processor
        lines.append(f"| {row.name} | {layers(row.merges)} | {one_liner} | {row.note} |")
    return lines


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## UNets", "", *rows_table("pipeline", unets.ROWS), ""]
    parts += ["## Around Stable Diffusion", "", *rows_table("feature", features.ROWS), ""]
    parts += ["## Transformers", "", *rows_table("model", transformers.ROWS), ""]
    parts += [SWEEP, *sweep.table(), ""]
    parts += [CACHES, *caches.table(), ""]
    parts += [OWN_MODELS, *caches.own_models(), ""]
    parts += [BACKENDS, *backends.table(), ""]
    parts += [TOOLS, "| what | holds |", "|---|---|"]
    parts += [f"| {row.name} | {row.note} |" for row in CHECKS]
    parts += ["", *diffusers_tests.section()]
    parts += [
        "## Not checked",
        "",
        "Each reason is tested too: it fails without any of our code.",
        "",
    ]
    parts += [
        "| what | reason |",
        "|---|---|",
        *(f"| {row.name} | {row.reason} |" for row in features.ABSENT),
        "",
    ]
    return "\n".join(parts)
