"""Test `mame_sd.attention` against plain loops: in every precision, around text, under masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mame_sd import attention
from mame_sd.core import reference
from mame_sd.core.groups import make_cells
from mame_sd.core.merge_keys import UNMERGED_SHARE, Choice, Grid, KeyMerging, merge_keys
from tests import oracle

GRID, BEFORE, AFTER = (6, 9), 3, 4
COUNT = BEFORE + math.prod(GRID) + AFTER
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def case(
    heads: int = 2, key_heads: int = 2, count: int = COUNT, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [2, H, N, 8] of a few directions, so that attention is not uniform."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    parts = []
    for h in (heads, key_heads, key_heads):
        pick = torch.randint(0, 5, (2, h, count), generator=generator)
        noise = torch.randn(2, h, count, 8, generator=generator, dtype=torch.float64)
        parts.append((centres[pick] + 0.5 * noise).to(dtype))
    return parts[0], parts[1], parts[2]


def by_loop(
    q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, ...], before: int, keep: float, **how: Any
) -> Tensor:
    """Return the oracle's output for the library's groups and queries."""
    mask, scale, draw, leader = (how.pop(n, None) for n in ("attn_mask", "scale", "draw", "leader"))
    settings, choice = KeyMerging(**how), Choice(draw, leader)
    grids = [Grid(before, grid, keep)]
    groups = merge_keys(q, k, v, grids, settings, mask, scale, choice).groups[0]
    count = settings.fit_queries
    if count is None:
        count = min(max(math.prod(grid) // 32, 64), 256)
    number = 0 if draw is None else int(draw)
    queries = groups.cells.queries[number][: max(1, count // (q.shape[1] // k.shape[1]))]
    if q.shape[2] == k.shape[2]:
        queries = queries + before
    image = oracle.Image(before, groups.groups.tolist(), groups.kept.tolist())
    fitted = queries.tolist() if count else ()
    return oracle.merged_attention(q, k, v, [image], fitted, mask, scale)[0]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "how",
    [{}, {"fit_queries": 0}, {"fit_queries": 7}, {"tile_size": 4}, {"scale": 0.2}, {"seed": 3}],
    ids=str,
)
def test_values_equal_the_loop(how: dict[str, Any], dtype: torch.dtype) -> None:
    """Test a fit with more queries (54, one for each token of the image) than kept keys (14)."""
    q, k, v = case(dtype=dtype)
    found = attention(q, k, v, GRID, BEFORE, AFTER, **how)
    assert found.dtype == dtype
    want = by_loop(q, k, v, GRID, BEFORE, 0.25, **how)
    torch.testing.assert_close(found.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("grid", "keep"), [((32, 32), 0.25), ((20, 33), 0.5), ((3, 8, 24), 0.125)], ids=str
)
def test_one_image_alone_equals_the_reference(
    grid: tuple[int, ...], keep: float, dtype: torch.dtype
) -> None:
    count = math.prod(grid)
    q, k, v = case(count=count, dtype=dtype)
    cells = make_cells(grid, (1 - UNMERGED_SHARE) * keep)
    tiles = [part.unique() for part in cells.order.view(cells.tiles, cells.width)]
    drawn = list(cells.order[cells.dst[0]].view(cells.tiles, cells.m))
    few, kept = cells.queries[0][: min(max(count // 32, 64), 256)], round(keep * count)
    found = attention(q, k, v, grid, keep=keep)
    for b in range(2):
        qkv = (t[b].double() for t in (q, k, v))
        want = reference.keep_attention(*qkv, tiles, drawn, few, kept)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found[b].double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kept", [1 / 54, 0.5])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (0, 4)])
def test_text_before_and_behind(before: int, after: int, kept: float) -> None:
    q, k, v = case(count=before + 54 + after)
    found = attention(q, k, v, GRID, before, after, kept)
    torch.testing.assert_close(found, by_loop(q, k, v, GRID, before, kept))
    alone = q[:, :, before : before + 54]
    image = attention(alone, k, v, GRID, before, after, kept)
    torch.testing.assert_close(image, found[:, :, before : before + 54])


def test_a_video_a_draw_and_a_leader() -> None:
    q, k, v = case(count=2 * 54)
    more = {"draw": torch.tensor([7]), "leader": torch.tensor([1, 1])}
    found = attention(q, k, v, (2, *GRID), **more)
    torch.testing.assert_close(found, by_loop(q, k, v, (2, *GRID), 0, 0.25, **more))
    assert not torch.allclose(found, attention(q, k, v, (2, *GRID)))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_of_queries_may_share_heads_of_keys(key_heads: int) -> None:
    q, k, v = case(4, key_heads)
    found = attention(q, k, v, GRID, BEFORE, AFTER)
    torch.testing.assert_close(found, by_loop(q, k, v, GRID, BEFORE, 0.25))
    heads = torch.linspace(0, 1, 4, dtype=torch.float64).view(1, 4, 1, 1)
    for mask in (
        mask_of("boolean", "all queries"),
        mask_of("additive", "all queries"),
        mask_of("boolean", "each query"),
        mask_of("additive", "each query") + heads,
    ):
        found = attention(q, k, v, GRID, BEFORE, AFTER, attn_mask=mask)
        torch.testing.assert_close(found, by_loop(q, k, v, GRID, BEFORE, 0.25, attn_mask=mask))


def mask_of(kind: str, shape: str) -> Tensor:
    """Return a mask of all keys. In a mask of rows the image's keys are alike in each row."""
    rows = {"all queries": 1, "each query": COUNT}[shape]
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, rows, COUNT, generator=generator, dtype=torch.float64)
    mask[..., 0] = 1  # each query sees something
    if rows > 1:
        mask[..., BEFORE:-AFTER] = mask[..., BEFORE, None]
    return mask > 0.3 if kind == "boolean" else 4 * mask


@pytest.mark.parametrize("shape", ["all queries", "each query"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks(kind: str, shape: str) -> None:
    q, k, v = case()
    mask = mask_of(kind, shape)
    found = attention(q, k, v, GRID, BEFORE, AFTER, attn_mask=mask)
    torch.testing.assert_close(found, by_loop(q, k, v, GRID, BEFORE, 0.25, attn_mask=mask))
    text = torch.zeros(1, 1, 1, COUNT, dtype=torch.float64)
    text[..., :2] = -math.inf  # padding of the text
    hidden = attention(q, k, v, GRID, BEFORE, AFTER, attn_mask=text)
    v[:, :, :2] = 1e6
    torch.testing.assert_close(
        attention(q, k, v, GRID, BEFORE, AFTER, attn_mask=text), hidden, rtol=1e-6, atol=1e-6
    )


def places(kind: str, width: int = 16) -> Tensor:
    """Return a mask of the keys of a square image: [N] for all queries, or [N, N]."""
    y, x = (torch.arange(width**2) // width, torch.arange(width**2) % width)
    far = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    return {
        "one key": torch.arange(width**2) == 7,
        "every second key": (x + y) % 2 == 0,
        "one in ten": torch.arange(width**2) % 10 == 0,
        "the left half": x < width // 2,
        "itself": far == 0,
        "a window": far <= 1,
        "its own row": y[:, None] == y,
        "what came before": torch.ones(width**2, width**2, dtype=torch.bool).tril(),
    }[kind]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", ["one key", "every second key", "one in ten", "the left half"])
@pytest.mark.parametrize("numbers", [False, True])
def test_keys_hidden_from_all_queries_belong_to_no_group(kind: str, numbers: bool) -> None:
    """Hidden keys don't change the output, whose error is as small as without a mask."""
    q, k, v = (t[:1, :, :256] for t in case(count=256, dtype=torch.float32))
    seen = places(kind)
    mask = torch.where(seen, 0.0, -1e4) if numbers else seen
    mask = mask.view(1, 1, 1, -1)
    found = attention(q, k, v, (16, 16), attn_mask=mask)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    plain = attention(q, k, v, (16, 16)) - F.scaled_dot_product_attention(q, k, v)
    assert (found - exact).norm() < 2 * plain.norm()
    v = v.masked_fill(~seen[:, None], 1e6)
    torch.testing.assert_close(attention(q, k, v, (16, 16), attn_mask=mask), found)
    rows = mask.expand(-1, -1, 256, -1)  # one row, repeated
    assert torch.equal(attention(q, k, v, (16, 16), attn_mask=rows), found)


@pytest.mark.parametrize("rows", ["all", "some", "the others"])
def test_queries_that_see_nothing_spoil_nothing(rows: str) -> None:
    """Padding that sees no key has the output 0 and does not change other outputs."""
    q, k, v = case(dtype=torch.float32)
    blind = torch.zeros(COUNT, dtype=torch.bool)
    blind[
        {"all": slice(None), "some": slice(BEFORE, None, 3), "the others": slice(BEFORE)}[rows]
    ] = True
    for before, after, part in ((BEFORE, AFTER, slice(None)), (0, 0, slice(BEFORE, -AFTER))):
        some = [t[:, :, part] for t in (q, k, v)]
        dark = blind[part]
        mask = ~dark[:, None].expand(-1, len(dark))
        mask = mask[:1] if rows == "all" else mask
        for given in (mask, torch.where(mask, 0.0, -math.inf)):
            found = attention(*some, GRID, before, after, attn_mask=given)
            assert not found[:, :, dark].any()
            exact = F.scaled_dot_product_attention(*some, attn_mask=given)
            assert (found - exact).norm() <= 0.3 * exact.norm()


@pytest.mark.parametrize("kind", ["itself", "a window", "its own row", "what came before"])
@pytest.mark.parametrize("numbers", [False, True])
def test_keys_that_each_query_sees_otherwise_are_refused(kind: str, numbers: bool) -> None:
    q, k, v = case(count=256, dtype=torch.float32)
    mask = torch.where(places(kind), 0.0, -math.inf) if numbers else places(kind)
    with pytest.raises(ValueError, match=r"\[B, 1, 1, N\].*the image's keys differ; keep=1"):
        attention(q, k, v, (16, 16), attn_mask=mask)
    whole = attention(q, k, v, (16, 16), attn_mask=mask, keep=1)
    assert torch.equal(whole, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.usefixtures("both_ways")
def test_gradients_are_those_of_finite_differences() -> None:
    q, k, v = (t[:1, :1, :, :3].detach().requires_grad_() for t in case(count=2 + 12))
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t, (3, 4), before=2, fit_queries=5), (q, k, v), atol=1e-4
    )
    attention(q, k, v, (3, 4), before=2).square().sum().backward()
    for t in (q, k, v):
        assert t.grad is not None
        assert t.grad.abs().amax((0, 1, 3)).min() > 0


def test_all_kept_changes_nothing() -> None:
    for key_heads in (4, 2):
        q, k, v = case(4, key_heads, dtype=torch.float32)
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=key_heads < 4)
        assert torch.equal(attention(q, k, v, GRID, BEFORE, AFTER, keep=1), want)


def test_a_constant_field_and_groups_of_copies_are_exact() -> None:
    """Groups count by their sizes: if all keys are copies of two, the output is exact."""
    q, k, v = case(count=54)
    ones = torch.ones_like(k)
    torch.testing.assert_close(attention(q, ones, 2 * ones, GRID), 2 * ones)
    one_of_two = torch.arange(54) % 2 * 3 % 2  # two kinds of keys, unlike one another
    pair = [t[:, :, :2].index_select(2, one_of_two) for t in (k, v)]
    exact = F.scaled_dot_product_attention(q, *pair)
    for fit in (0, None):
        found = attention(q, *pair, GRID, keep=0.5, fit_queries=fit, tile_size=0)
        torch.testing.assert_close(found, exact)


@pytest.mark.usefixtures("both_ways")
def test_samples_are_their_own_and_nan_stays_within_one() -> None:
    q, k, v = case()
    want = attention(q, k, v, GRID, BEFORE, AFTER)
    swapped = attention(*(t.flip(0) for t in (q, k, v)), GRID, BEFORE, AFTER)
    torch.testing.assert_close(swapped, want.flip(0))
    for t in (q, k, v):
        broken = [x.clone() for x in (q, k, v)]
        broken[[q is t, k is t, v is t].index(True)][0, 0, BEFORE + 5] = math.nan
        found = attention(*broken, GRID, BEFORE, AFTER)
        assert torch.equal(found[1], want[1])
        assert found[0].isnan().any()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("at", range(0, 64, 3))
def test_nan_stays_within_its_head_and_reaches_no_sample_that_follows_another(at: int) -> None:
    q, k, v = (
        torch.randn(2, 2, 64, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    k[0, 0, at] = math.nan
    found = attention(q, k, v, (8, 8), leader=torch.tensor([0, 0]))
    assert found[0, 0].isnan().any()
    assert found[0, 1].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.usefixtures("both_ways")
def test_large_numbers_of_fp16_do_not_overflow() -> None:
    q, k, v = case(dtype=torch.float16)
    found = attention(q, 300 * k, 20000 * v.clamp(-3, 3), GRID, BEFORE, AFTER)
    want = by_loop(q, 300 * k, 20000 * v.clamp(-3, 3), GRID, BEFORE, 0.25)
    assert found.isfinite().all()
    assert (found.double() - want).norm() < 0.02 * want.norm()
    q, k, v = (
        torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(0)) for _ in "qkv"
    )
    assert attention(q.half(), k.half(), (v.clamp(-1, 1) * 6e4).half(), (16, 16)).isfinite().all()


@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_kernel_without_bias_gets_keys_that_carry_sizes(key_heads: int) -> None:
    """If queries share a direction, sizes in the keys act nearly as a bias does."""
    q, k, v = case(4, key_heads)
    q = q + 2

    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, enable_gqa: bool = False) -> Any:
        seen.append(k)
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=enable_gqa)

    seen: list[Tensor] = []
    call: dict[str, Any] = {"scale": 0.3, "fit_queries": 0}
    found = attention(q, k, v, GRID, BEFORE, AFTER, kernel=flash, **call)
    assert torch.equal(seen[0][:, :, :BEFORE], k[:, :, :BEFORE])  # keys of the text are unchanged
    counted = attention(q, k, v, GRID, BEFORE, AFTER, **call)
    merged = merge_keys(q, k, v, [Grid(BEFORE, GRID, 0.25)], KeyMerging(fit_queries=0), scale=0.3)
    uncounted = flash(q, merged.key, merged.value, 0.3, q.shape[1] != k.shape[1])
    assert (found - counted).norm() < 0.3 * (uncounted - counted).norm()
    mask = mask_of("boolean", "all queries")
    with pytest.raises(ValueError, match=r"an argument attn_mask, for it is \[2, 1, 1, 21\] here"):
        attention(q, k, v, GRID, BEFORE, AFTER, attn_mask=mask, kernel=flash)
    with pytest.raises(ValueError, match=r"an argument scale, for it is 0\.3 here"):
        attention(q, k, v, GRID, BEFORE, AFTER, scale=0.3, kernel=lambda q, k, v, **_: q)


def test_an_empty_batch_gives_an_empty_one() -> None:
    q, k, v = (t[:0] for t in case())
    assert attention(q, k, v, GRID, BEFORE, AFTER).shape == (0, *q.shape[1:3], v.shape[3])


Q, K, V = case()
NONE = {name: t[:, :0] for name, t in (("q", Q), ("k", K), ("v", V))}
WHOLE = {name: t.long() for name, t in (("q", Q), ("k", K), ("v", V))}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"before": 0, "after": 0}, r"\[B, H, 54 or 54, D\], \[B, H', 54, D\] and \[B, H', 54, D'\]"),
    ({"v": V[:, :, 1:]}, r"got .*\[2, 2, 60, 8\] of torch\.float64"),
    ({"q": Q[:, :, 5:]}, "q, k, v: expected tensors of floating-point numbers of one dtype"),
    ({"q": Q[:, :1]}, "H a multiple of H'"),
    ({"k": K.half()}, "of one dtype"),
    (WHOLE, "floating-point"),
    (NONE, r"\[2, 0, 61, 8\]"),
    ({"k": K[..., :4]}, r"\[2, 2, 61, 4\]"),
    ({"v": V.to("meta")}, "on cpu, cpu, meta"),
    ({"q": Q.tolist()}, "got list, Tensor, Tensor"),
    ({name: t.to(torch.float8_e4m3fn) for name, t in (("q", Q), ("k", K), ("v", V))}, "float8"),
    ({"draw": 5}, r"draw: expected a LongTensor"),
    ({"draw": torch.tensor([64])}, r"draw: expected .* from 0 to 63, got \[64\], \[1\] of"),
    ({"leader": torch.tensor([0, 2])}, r"leader: expected .* from 0 to 1, got \[0, 2\]"),
    ({"scale": math.nan}, "scale: expected a finite number, got nan"),
    ({"scale": "1"}, "scale: expected a finite number, got '1'"),
    ({"keep": 0}, "keep: expected a share above 0"),
    ({"fit_queries": -1}, "fit_queries: expected"),
    ({"seed": None}, "seed: expected a number"),
    ({"redraw": True}, "unknown argument 'redraw'"),
    ({"grid": (-6, -9)}, "grid, before, after: expected"),
    ({"before": -1}, "grid, before, after: expected"),
    ({"attn_mask": 1}, "attn_mask: expected"),
    ({"attn_mask": torch.zeros(3, 3)}, r"attn_mask: expected .* \[2, 2, 61, 61\], got \[3, 3\]"),
    ({"attn_mask": Q.new_zeros(1, 1, 54, 61)}, r"got \[1, 1, 54, 61\]"),
    ({"attn_mask": Q.new_zeros(())}, r"attn_mask: expected .* got \[\] of"),
    ({"attn_mask": torch.ones(61)}, r"a tensor of booleans or torch\.float64 .* torch\.float32"),
    ({"attn_mask": torch.ones(61, dtype=torch.bool, device="meta")}, "on cpu, .* on meta"),
    (
        {"kernel": lambda q, k, v, attn_mask: q.float()},
        "kernel: .* torch.float64, got torch.float32",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_errors_are_one_line(given: dict[str, Any], message: str) -> None:
    call = {"q": Q, "k": K, "v": V, "grid": GRID, "before": BEFORE, "after": AFTER, **given}
    with pytest.raises(ValueError, match=message) as caught:
        attention(**call)
    assert "\n" not in str(caught.value)


def test_shapes_propagate_without_numbers() -> None:
    mode = FakeTensorMode()
    mask, leader = torch.ones(2, 1, 1, COUNT, dtype=torch.bool), torch.tensor([1, 1])
    q, k, v, mask, leader = (mode.from_tensor(t) for t in (*case(4, 2), mask, leader))
    for counts in (True, False):
        call: Any = {"attn_mask": mask} if counts else {"kernel": lambda q, k, v, enable_gqa: q}
        with mode:
            found = attention(q, k, v, GRID, BEFORE, AFTER, leader=leader, **call)
        assert found.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logit", [2.0, 15.0, 22.0, 40.0])
def test_queries_that_see_text_alone_do_not_spoil_values_for_others(
    dtype: torch.dtype, logit: float
) -> None:
    q, k, v = (
        torch.randn(1, 2, 256 + 16, 32, generator=torch.Generator().manual_seed(n))
        for n in range(3)
    )
    # The image's queries attend to the text, and the text's queries to everything. So the fit sees
    # tiny weights of merged keys, down to rounding errors and zero.
    q[..., 0], k[..., 0] = 32**0.5, 0
    q[:, :, 256:, 0] = 0
    k[:, :, 256:, 0] = logit
    q, k, v = (t.to(dtype) for t in (q, k, v))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    error, without = (
        (attention(q, k, v, (16, 16), after=16, fit_queries=count).double() - exact).norm()
        for count in (None, 0)
    )
    assert error < 3 * without


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_stay_near_the_range_of_the_values(dtype: torch.dtype) -> None:
    """Unbounded, outputs left the range by up to 3.7 times the largest value."""

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    for seed in (5, 8, 25, 41):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            10 * torch.randn(1, 1, 77 + 256, 64, generator=generator, dtype=torch.float64)
            for _ in "qkv"
        )
        low, high = (t.to(dtype) for t in torch.aminmax(v, dim=2, keepdim=True))
        room = 0.25001 * (high - low)
        for more in ({}, {"kernel": flash}):
            found = attention(q.to(dtype), k.to(dtype), v.to(dtype), (16, 16), before=77, **more)
            assert (found >= low - room).all()
            assert (found <= high + room).all()
