"""Seed faults into a copy of the library, one at a time, and see whether the tests catch them.

    python -m scripts.robustness.mutations [--only attention]

Each fault changes one place of one file, of the sort that bit before: a wrong span, a lost mask, an
unshared plan, a stale handle, a refusal that is missing. The tests named for the file run with
`-x`, those that should catch it first. It is caught where they fail, missed where they pass, and
stale where the place is no longer there. Libraries are loaded once, and each fault has a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# FILE: TESTS, below mame_sd and tests, then faults of that file, OLD => NEW.
FAULTS = """
core/intercept.py: core diffusion/test_calls.py diffusion/test_kernels.py test_models.py
    if name not in self.names: => if False:
    self.groups.setdefault(self.calls, {}) => self.groups.setdefault(0, {})
    shift = 0 if self.length is None else count - self.length => shift = 0
    mask = mask == 0 => mask = mask
core/merge_keys.py: core diffusion/test_calls.py diffusion/test_kernels.py test_models.py
    stay = max(0, round(keep * cells.tokens) - cells.kept) => stay = 0
    grids[0].start if q.shape[2] == k.shape[2] else 0 => 0
    log_sizes[:, None, None] if size_bias => log_sizes[:, None, None] * 0 if size_bias
    if not size_bias and scale: => if False:
    masked = _with_mask(zero, attn_mask, grids, groups, k.shape[2]) => masked = zero
    of_grid.kept + grid.start] => of_grid.kept]
    (first * length + start => (first * length
    torch.where(mask, bias, -torch.inf) => torch.where(mask, -torch.inf, bias)
    count * k.shape[1] // q.shape[1])] => count)]
    merged = grids[0].start, => merged = 0,
core/groups.py: core
    of_chosen, of_chosen, value=-0.5) => of_chosen, of_chosen, value=-1.0)
    near.index_fill_(1, dst, torch.inf) => near.index_fill_(1, dst[:0], torch.inf)
    row.index_copy_(1, dst, cells.number.expand(slots.shape[0], -1)) => pass
    row.masked_fill_(cells.pad, -1) => pass
    torch.where(rows < 0, merged, rows + first) => (rows + first)
    sums[:merged] / counts.unsqueeze(1) => sums[:merged]
    shares = (belongs / counts) => shares = (belongs / 1)
    else slots.index_select(0, led) => else slots[: len(led)]
    numbers[: cells.kept : cells.m] => numbers[: cells.tiles]
    with torch.inference_mode(False), no_modes(), => with no_modes(),
core/merge_keys.py: diffusion/test_equal_text.py
    log_sizes[:, -1] += math.log(repeats) => pass
    fit_mask = repeats_row(k.shape[2], repeats, q) => pass
    if not q.dtype == k.dtype == v.dtype: => if False:
core/groups.py: diffusion/test_equal_text.py
    cumprod(1).sum(1).min()) => cumprod(1).sum(1).max())
    or unreadable(text) or torch.is_grad_enabled(): => or unreadable(text):
diffusion/families/attention.py: diffusion/test_equal_text.py
    text is None or masked or not unwrapped or type => text is None or masked or type
    if repeats == 1 or isinstance(self.route(call, layout, EVERY), Skip): => if repeats == 1:
core/cells.py: core
    manual_seed((seed or 0) % 2**32) => manual_seed(0)
    row_major.view(size).transpose(0, 1).flatten() if len(size) == 3 else row_major => row_major
core/guidance.py: core
    times.float().amax() => times.float().amin()
    guide = unguided.index(False) => guide = 0
    == chunks[guide]).all() => == chunks[guide]).any()
core/fit.py: core
    (diagonal.sum(-1) / count) => (diagonal.sum(-1) / 3)
    flatten(0, -3) - torch.bmm => flatten(0, -3) + torch.bmm
    / count).clamp_min(least) => / count)
    some.shape[1] / others.shape[1], => 1,
    value=1 / scale) => value=1)
    fitted = fitted.clamp(-HALF_MAX, HALF_MAX) => pass
core/restore.py: core/test_restore.py
    slots = slots - origin => slots = slots
    torch.add(origin * -0.5, slots, alpha=0.5) => slots - origin
    nearest.masked_fill_(pad, -torch.finfo(dtype).max) => pass
    nearest.scatter_(1, drawn, -torch.inf) => pass
    self.factor - self.factor.mean(-1, keepdim=True) => self.factor
    sums.clamp_min_(LARGEST) => torch.full_like(sums, LARGEST)
    y = within(y.to(parts.dtype), parts) => y = y.to(parts.dtype)
    y[:, end:].add_(last) => pass
    at.append(image.at + start) => at.append(image.at)
    f[:, at:last]) => f[:, : last - at])
    or not self.cells.in_order or => or
    _solved(factor, wide - mean) => _solved(factor, wide)
    return y.scatter_(1, self.slots.unsqueeze(-1).expand_as(parts), parts) => return y
    .add_(RIDGE) => .add_(0.1)
    y.clamp_(-HALF_MAX, HALF_MAX) => y
    index_select(0, leader).flatten(0, 1) => flatten(0, 1)
    return weights.scatter_(1, rows, eye.expand_as(self.factor)) => return weights
    self.factor.square().sum(1) => self.factor.square().sum(2)
core/paper.py: core diffusion/test_processor.py
    src).transpose(1, 2)).clamp(-1, 1) => src).transpose(1, 2))
    stays = ~merges.all(0) => stays = ~merges.any(0)
    tie = mass <= REFINE_FLOOR * total => tie = mass < 0 * total
    .transpose(1, 2), dst) => .transpose(1, 2), dst / self.counts.unsqueeze(-1).to(dst))
diffusion/context.py: diffusion/test_calls.py diffusion/test_families.py diffusion/test_apply.py
    is latents and self._version == latents._version and => is latents and
    same = len(others) == len(self._others) and => same = False and
    if self.groups and not unchanged( => if self.groups and unchanged(
    self._moved = not unchanged( => self._moved = False and not unchanged(
    if length == self.before + self.count + self.after else None => if length else None
diffusion/threads.py: captions/test_calls_apart.py diffusion/test_threads.py
    if one is not block) => if one[0] is not value)
    return blocks[-1][0] if => return blocks[0][0] if
diffusion/hooks.py: diffusion/test_calls.py diffusion/test_apply.py diffusion/test_families.py
    latents is not None and not of_frames => latents is not None
    again = _checkpoints(module) => again = False
    elif shapes != self._shapes.value: => elif False:
diffusion/attention_backends.py: diffusion/test_kernels.py test_models.py
    mask is not None and mask.dim() == 2: => False:
    counted = name in _TAKES_BIAS and => counted =
diffusion/layer.py: comfyui/test_node.py test_matrix.py
    step.draws[self.place : self.place + 1] => step.draws[:1]
diffusion/layer.py: diffusion/test_calls.py diffusion/test_families.py test_references.py
    plans=None if learns else plans) => plans=plans)
    start += tokens.count => start += 0
    plans.calls[name], config, sizes => plans.calls[name], sizes
    plans is not None and plans.latents() is not None => plans is not None
    stats.skipped(why, layer.count(call, layout)) => stats.skipped("", 0)
diffusion/layer.py: diffusion/test_calls.py
    plans.calls[name] += 1 => pass
diffusion/restoring.py: diffusion/test_restoring.py test_models.py
    return GATED => pass
    return CACHED => pass
    return BY_TOKEN => pass
    any(call.kwargs.get(name) is not None for name in _BY_TOKEN) => False
    if job is not None and job.merges: => if False:
    if not setting.of_layer: => if False:
    torch.cat([y[:, :start], restored, y[:, end:]], 1) => y
diffusion/fused_mlp.py: diffusion/test_restoring.py test_models.py
    is_hooked(out) and _is_outermost(out)) => is_hooked(out))
    CACHED if any(map(has_cache, (into, out))) else "" => ""
    linear.weight[:, :width], linear.bias => linear.weight[:, :width]
    NOT_PLAIN if self.ahead and not _is_plain(call) else "" => ""
    act._forward_hooks or act._forward_pre_hooks => act._forward_hooks
    nn.ReLU) and "forward" not in vars(act) => nn.ReLU)
    of_block = getattr(call.forward, "__func__", None) is class_forward => of_block = True
    and all(_has_own_hook(module) and _is_outermost(module) => and all(True
    and not any(m._backward_hooks or m._backward_pre_hooks => and not any(False
diffusion/rows.py: diffusion/test_restoring.py test_models.py
    rows[:, start : start + self.chosen.tokens_kept] => rows[:, : self.chosen.tokens_kept]
    or len(t) != len(self.chosen.at) => or False
attach.py: diffusion/test_hooks_wrapped.py diffusion/test_calls.py diffusion/test_restoring.py
    if refs: => if False:
    if "_hf_hook" in vars(module) and => if False and
attach.py: perception/test_tools.py captions/test_captions.py
    if there is not None and not is_ours(there): => if False:
diffusion/hook_registry.py: diffusion/test_hooks_wrapped.py diffusion/test_calls.py
    hook.forget() => hook.name
diffusion/apply_denoiser.py: diffusion/test_threads.py diffusion/test_apply.py test_models.py
    "temporal_transformer_blocks", => "temporal",
    isinstance(getattr(module, "processor", None), MaMeAttnProcessor) => False
    check_idle(root, "remove_mame") => root
diffusion/replaced_denoiser.py: diffusion/test_replaced_denoiser.py
    elif handle.active: => elif False:
    getattr(pipe, "__dict__", {}).pop(_ATTRIBUTE, None) => pass
diffusion/families/layouts.py: diffusion/test_layouts.py diffusion/test_families.py test_models.py
    before = mode + call => before = call
    if not (image == image[:1]).all(): => if False:
    return layouts.pop() if len(layouts) == 1 else UNLIKE => return layouts.pop()
    is not t or version != t._version => is not t
diffusion/families/attention.py: diffusion/test_families.py test_models.py
    after + text if family.joint == "last" else => after + text if family.joint == "first" else
    mask is not None and not family.mask: => False:
    kept.to(t.device) + start => kept.to(t.device)
diffusion/families/attention.py: diffusion/test_processor.py diffusion/test_apply.py test_models.py
    {} if call.module.scale_qk else => {} if True else
    attn.residual_connection, => False,
config.py: test_config.py diffusion/test_processor.py
    lambda n: 0 < n <= 1) => lambda n: 0 < n)
    if self.tau is not None and self.keep is not None: => if False:
    changes = {other: None, **changes} => changes = {**changes}
caches/view.py: caches
    self.slots[:, :, None, None] > slots.view(-1, 1) => self.slots[:, :, None, None] >= 9**9
caches/selection.py: caches
    if view.real is not None:  # padding => if False:  # padding
caches/layer.py: caches
    self.seen += new => self.seen += 1
    (mask + bias.unsqueeze(2).to(dtype)).clamp => mask.clamp
captions/farthest.py: captions
    torch.maximum(nearest, row) => torch.minimum(nearest, row)
captions/shorten.py: captions
    kept.of(call["labels"], -100) => kept.of(call["labels"], 0)
    torch.cat([real.to(mask), mask[:, removed.length :]], 1) => mask[:, -real.shape[1] - later :]
    [:, None].to(places) + places => [:, None].to(places) * 0 + start + places
captions/patch.py: captions
    for row in rows for one in row * times] => for _ in range(times) for row in rows for one in row]
caches/handle.py: caches
    if self._live and tokens > 1 and not others and => if False and
perception/hooks.py: perception/test_tools.py
    elif child is not self.child: => elif self.child is None:
perception/handle.py: perception/test_tools.py perception/test_restore.py
    placed.append((parent, "before", hook.follow)) => pass
perception/forward_state.py: perception/test_restore.py
    in sorted(plans, reverse=True): => in sorted(plans):
perception/encoder_registry.py: perception/test_apply.py
    [*parts, self.keys] => parts
perception/merged_block.py: perception
    if not self.compares_keys: => if True:
    if not dense and not (shared.restore and last): => if not dense:
    else sizes.log().to(normed.dtype) => else sizes.to(normed.dtype)
    plan.merge(x.to(exact) * share) / held => plan.merge(x.to(exact))
runs/run_folder.py: runs
    and record.get("sha256", digest) == digest => and digest
    if foreign and self.manifest.name not in foreign: => if False:
runs/jobs.py: runs
    [job.seed, job.prompt.id, job.repeat] => [job.seed, job.prompt.id]
    if last and last[0].steered == job.steered and => if last and
runs/prompt_files.py: runs
    unicodedata.normalize("NFC", prompt.id).casefold() => prompt.id
    identity.startswith(".") => False
runs/generate.py: runs/test_generate.py
    batches[self.process.rank :: self.process.count] => batches
    if job.name not in done] => ]
runs/loading.py: runs/test_loading.py
    if values.is_meta: => if False:
runs/sampling.py: runs cli/test_app.py
    if settings.height is not None: => if False:
cli/errors.py: cli
    return USAGE, str(error) => return MACHINE, str(error)
    if _interrupted(error): => if False:
cli/groups.py: cli
    if others: => if False:
"""


def faults() -> list[tuple[str, str, str, list[str]]]:
    """(file, old, new, tests) of each fault."""
    found: list[tuple[str, str, str, list[str]]] = []
    file, tests = "", [""]
    for line in filter(None, FAULTS.splitlines()):
        if line.startswith(" "):
            old, new = line.strip().split(" => ")
            found.append((f"mame_sd/{file}", old, new, tests))
        else:
            file, _, rest = line.partition(": ")
            tests = [f"tests/{test}" for test in rest.split()]
    return found


def copied(place: Path) -> None:
    """Copy what git tracks or would track to `place`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)


def passes(place: Path, tests: list[str], output: Path) -> bool:
    """Whether these tests of the tree at `place` pass, in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        os.chdir(place)
        sys.path.insert(0, str(place))
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--rootdir={place}"]
        os._exit(
            int(
                pytest.main(
                    [*options, *(t for t in tests if (place / t.partition("::")[0]).exists())]
                )
            )
        )
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main() -> None:
    """Print a row of Markdown for each fault with what caught it, and how many were caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose file has this in its name")
    only = parser.parse_args().only
    import diffusers

    for name in dir(diffusers):  # loaded once for all forks
        with contextlib.suppress(Exception):
            getattr(diffusers, name)
    chosen = [fault for fault in faults() if only in fault[0]]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        place, output = Path(folder) / "tree", Path(folder) / "output"
        copied(place)
        for file, old, new, tests in chosen:
            text = (place / file).read_text() if (place / file).exists() else ""
            said = "stale"
            if text.count(old) == 1:
                (place / file).write_text(text.replace(old, new))
                said = "**missed**" if passes(place, tests, output) else first_failure(output)
                (place / file).write_text(text)
            caught += said not in ("stale", "**missed**")
            print(f"| {file.removeprefix('mame_sd/')} | `{old[:44]}` | {said[:44]} |", flush=True)
    print(f"{caught} of {len(chosen)} caught")


def first_failure(output: Path) -> str:
    """Return the test that failed first, or the last line if none ran."""
    lines = output.read_text().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1].rpartition("/")[2].partition("[")[0] if failed else lines[-1]


if __name__ == "__main__":
    main()
