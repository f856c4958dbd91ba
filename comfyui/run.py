"""Record what happened in one run of the sampler, and log it in one line when the run ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

KEY = "mame_sd"  # of the Call in transformer_options, and of the wrappers
RULED_OUT = "the settings leave a layer as it is"
SMALL = "{} tokens are fewer than min_tokens={}"
log = logging.getLogger("mame-sd")
NOT_CALLED = "the engine never handed its attention to the node; update ComfyUI"
TAKEN = "another node has replaced our attention; remove one of the two nodes"
UNREACHED = "another node has replaced the engine's attention; remove one of the two nodes"
OTHER_ATTENTION = "attention that another node has set is called with the merged keys"
KEEPS_ALL = "keep=1 keeps all keys"
UNCOMPILED = "MaMe: MLPs are not restored in a compiled model"
OUTSIDE = "no step was between start_percent and end_percent"


@dataclass
class Run:
    """Record of one run; its calls may come from several threads.

    Compiled graphs record nothing here, because they would be compiled again after each record.

    Attributes:
        merged: what merged.
        left: why other layers didn't merge.
        compiled: True if some calls ran in a compiled graph.
        other_attention: True if another node's attention is called with the merged keys.
    """

    merged: dict[str, None] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    compiled: bool = False
    other_attention: bool = False

    def note_merged(self, merged: Mapping[str, None]) -> None:
        """Record what merged in a call."""
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.merged.update(merged)

    def note_left(self, reason: str, *values: object) -> None:
        """Record why a layer didn't merge."""
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.left.add(reason.format(*values))

    def tell(self) -> None:
        """Log what merged, or a warning with every reason if nothing did."""
        if self.merged:
            extra = f"; {OTHER_ATTENTION}" if self.other_attention else ""
            log.info("MaMe merged %s%s", ", ".join(sorted(self.merged)), extra)
        elif not self.compiled:
            log.warning("MaMe merged nothing: %s", "; ".join(sorted(self.left)) or NOT_CALLED)
