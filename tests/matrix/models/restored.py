"""Check that chosen tokens, and those that aren't the image's, are exact in restored modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mame_sd import MaMeHandle, apply_mame
from mame_sd.core.restore import Chosen, ChosenOfImages, ChosenTokens
from mame_sd.diffusion.fused_mlp import FusedOutHook
from mame_sd.diffusion.restoring import BlockHook, MLPHook, RestoreHook, TokensCall
from mame_sd.diffusion.rows import image_start, running_fused_mlp, running_rows
from tests.matrix.models.case import Case

SETTINGS = {"mlp": "mlp_keep", "block": "block_keep"}


@dataclass(eq=False)
class Restored:
    """One call that was restored, whose input has `length` tokens, the image's from `start`.

    The image's tokens are followed by those of references that are restored too. `x` is what is
    added to the fit: a block's input, or the attention's part of a projection that it shares with
    an MLP. `plain` is the output without restoring.
    """

    hook: RestoreHook
    chosen: Chosen
    start: int
    length: int
    x: Tensor
    output: Any
    plain: Any

    def check(self) -> None:
        """Assert that the output is exact but for the image's tokens that were not chosen."""
        tokens, changed = self.chosen.tokens_in, False
        outputs, plain = (
            list(y) if isinstance(y, list | tuple) else [y] for y in (self.output, self.plain)
        )
        for found, want in zip(outputs, plain, strict=True):
            if not isinstance(found, Tensor):
                assert found is want
                continue
            if self.hook.family.sequence_first:
                found, want = found.transpose(0, 1), want.transpose(0, 1)
            end = self.start + tokens
            parts = [(found, want)]
            if found.dim() == 3 and found.shape[1] == self.length:
                image = found[:, self.start : end], want[:, self.start : end]
                changed = changed or not torch.allclose(*image, rtol=1e-3)
                others = ((t[:, : self.start], t[:, end:]) for t in (found, want))
                taken = tuple(map(self.chosen.take, image))
                parts = [taken, *zip(*others, strict=True)]
                if image[0].shape == self.x.shape:
                    x = torch.zeros_like(self.x) if isinstance(self.hook, MLPHook) else self.x
                    fitted = x + self.chosen.restore(taken[1] - self.chosen.take(x))
                    parts.append((image[0], fitted))
            for a, b in parts:
                largest = float(want.abs().amax())
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * largest)
        assert changed, "nothing was restored"


@contextmanager
def restoring(handle: MaMeHandle, split: list[bool] | None = None) -> Iterator[list[Restored]]:
    """Record each call of a handle's modules that is restored while the block runs.

    `split` takes for each shared projection whether the MLP's part of its input is zero for tokens
    that were not chosen.
    """
    split = [] if split is None else split
    found: list[Restored] = []
    latest: dict[RestoreHook, list[ChosenTokens]] = defaultdict(list)
    shared = handle._shared
    choose = RestoreHook.choose

    def noted(self: RestoreHook, *args: Any) -> ChosenTokens:
        chosen = choose(self, *args)
        latest[self].append(chosen)
        return chosen

    def compared(kind: type[RestoreHook]) -> Any:
        compute = kind.output

        def both(self: Any, call: TokensCall) -> Any:
            latest.pop(self, None)
            calls = self.stats.totals()
            output = compute(self, call)
            restored = (
                self.stats.totals() != calls and not self.stats.last_reason and self in latest
            )
            if not restored or running_rows() is not None:
                return output
            x = call.x.transpose(0, 1) if self.family.sequence_first else call.x
            chosen, setting = ChosenOfImages(latest[self]), shared.setting
            whole = setting.config.replace(mlp_keep=1, block_keep=1)
            shared.setting = replace(setting, config=whole, of_layer={})
            try:
                plain = call.run()
            finally:
                shared.setting = setting
            start = self.start(self.layout(), x) or 0
            image = x[:, start : start + chosen.tokens_in]
            found.append(Restored(self, chosen, start, x.shape[1], image, output, plain))
            return output

        return mock.patch.object(kind, "output", both)

    def projected(self: Any, call: TokensCall) -> Any:
        """Compare a projection out of attention and MLP with attention's part of it."""
        running = running_fused_mlp()
        rows = None if running is None else running.rows
        hidden = None if rows is None else rows.hidden
        output = project(self, call)
        if running is not None and rows is not None:
            x, chosen = call.x, rows.chosen
            linear: Any = call.module
            width = linear.out_features
            if hidden is not None:
                x = torch.cat([x[..., :width], rows.put(hidden, x)], -1)
            start = image_start(rows.tokens, x)
            image = x[:, start : start + chosen.tokens_in]
            others = torch.ones(image.shape[:2]).scatter(1, chosen.at, 0)
            split.append(not image[..., width:][others > 0].any() and x[..., :width].any())
            attention = call.run(F.pad(x[..., :width], (0, x.shape[-1] - width)))
            added = attention[:, start : start + chosen.tokens_in]
            found.append(Restored(self, chosen, start, x.shape[1], added, output, call.run(x)))
        return output

    project = FusedOutHook.output
    with (
        mock.patch.object(RestoreHook, "choose", noted),
        mock.patch.object(FusedOutHook, "output", projected),
        compared(MLPHook),
        compared(BlockHook),
    ):
        yield found


def restored_of(case: Case, model: nn.Module, kind: str) -> str:
    """Check MLPs or blocks that are restored; say how many are, and why the others are not."""
    try:
        handle = apply_mame(model, keep=1, min_tokens=1, **{SETTINGS[kind]: 0.25})
    except ValueError as error:
        return "none: " + str(error).rpartition(": ")[2].partition(";")[0]
    split: list[bool] = []
    with torch.no_grad(), restoring(handle, split) as calls:
        model(**case.inputs())
    assert all(split)
    for call in calls:
        call.check()
    stats = [hook.stats for _, hook in handle.restored if hook.stats.kind == kind]
    left = Counter(one.last_reason for one in stats if one.last_reason)
    assert len({call.hook.stats.name for call in calls}) == len(stats) - left.total()
    count = f"{len(stats) - left.total()} of {len(stats)}" if left.total() < len(stats) else "none"
    return ": ".join(filter(None, (count, "; ".join(sorted(map(str, left))))))
