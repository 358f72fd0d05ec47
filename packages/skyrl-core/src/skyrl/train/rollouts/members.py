"""Which servers a run uses: the urls of its configuration, or those of a file that may change during the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyrl_rollout.channel import parse_url

log = logging.getLogger(__name__)

FILE_SCHEME = "file://"


def url_file(urls: Sequence[str] | None) -> Path | None:
    """The file that `external_server_urls=['file:///path']` names, else None. Raises ValueError where it stands beside
    other urls or is not absolute."""
    named = [url for url in urls or () if url.startswith(FILE_SCHEME)]
    if not named:
        return None
    parts = urlsplit(named[0])
    if len(urls or ()) > 1 or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"{named[0]}: write one entry, file:///absolute/path, and every server's url into that file")
    return Path(unquote(parts.path))


def read_urls(path: Path) -> list[str]:
    """One url a line; empty lines and what follows a `#` count for nothing. Raises OSError, and ValueError naming the
    line that is no url, or a file without any."""
    urls: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        url = line.partition("#")[0].strip()
        if not url:
            continue
        try:
            parse_url(url)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if url not in urls:
            urls.append(url)
    if not urls:
        raise ValueError(f"{path} names no server: write one url a line")
    return urls


def server_urls(urls: Sequence[str] | None) -> list[str]:
    """The urls to connect to now; empty where the run starts servers of its own."""
    path = url_file(urls)
    return read_urls(path) if path is not None else list(urls or ())


class UrlFile:
    """A file of urls and what it named last."""

    def __init__(self, path: Path, urls: Sequence[str]) -> None:
        self.path, self.urls = path, list(urls)
        self._stamp = _stamp(path)

    def changed(self) -> list[str] | None:
        """The urls where the file was written since the last look, else None. One that cannot be read counts as not
        written, and the log says why."""
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self.urls = read_urls(self.path)
        except (OSError, ValueError) as error:
            log.warning("the file of rollout servers is left as it was: %s", error)
            return None
        return self.urls


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        info = path.stat()
    except OSError:
        return (0, 0, 0)
    return (info.st_mtime_ns, info.st_size, info.st_ino)
