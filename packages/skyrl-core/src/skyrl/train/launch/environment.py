"""The servers' own Python environment: brought in line with the lock before a server starts, and left alone if it is.

One environment, `.venvs/server` of the workspace, filled by uv from the same lock as the trainer's. One process at a
time may change it, and none while a server runs from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from skyrl.train.launch.table import ServerEntry

log = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 3600.0
STAMP = "skyrl-synced"
IN_USE = "skyrl-in-use"
UNFINISHED = "server-sync.unfinished"
OnWait = Callable[[str], None]


def ensure(entry: ServerEntry, device: str, on_wait: OnWait) -> tuple[Path, int]:
    """(the environment's bin folder, a file descriptor that holds it in use until it is closed).

    A server must inherit the descriptor: while it lives, no other run changes the environment. ValueError where uv is
    missing or fails (with its last lines), or where the environment must change under a running server.
    """
    assert entry.root is not None and entry.package is not None
    environment = entry.root / ".venvs" / "server"
    environment.parent.mkdir(exist_ok=True)
    with _locked(environment.parent / "server.lock", on_wait):
        _remove_unfinished(environment)
        wanted = _wanted(entry, device)
        if _stamp(environment) != _fingerprint(environment, wanted):
            command = _uv_sync(entry, device)
            if _must_change(entry, environment, command):
                _sync(entry, environment, command, device, on_wait)
            (environment / STAMP).write_text(_fingerprint(environment, wanted))
        return environment / "bin", _hold(environment, fcntl.LOCK_SH)


def _wanted(entry: ServerEntry, device: str) -> str:
    """Everything that says what the environment should hold."""
    assert entry.root is not None
    digest = hashlib.sha256(f"{entry.package}[{entry.extras.get(device)}] {sys.version_info[:2]}".encode())
    members = sorted((entry.root / "packages").glob("*/pyproject.toml"))
    for path in (entry.root / "uv.lock", entry.root / "pyproject.toml", *members):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _fingerprint(environment: Path, wanted: str) -> str:
    """What is wanted together with what is there: it differs once anything else was installed or removed."""
    installed = sorted(
        f"{folder.name} {(folder / 'RECORD').stat().st_mtime_ns}"
        for folder in environment.glob("lib/python*/site-packages/*.dist-info")
        if (folder / "RECORD").is_file()
    )
    return hashlib.sha256("\n".join([wanted, *installed]).encode()).hexdigest()


def _stamp(environment: Path) -> str:
    path = environment / STAMP
    return path.read_text() if path.is_file() else ""


def _uv_sync(entry: ServerEntry, device: str) -> list[str]:
    assert entry.package is not None
    extra = entry.extras.get(device)
    extras = ["--extra", extra] if extra else []
    return [find_uv(), "sync", "--locked", "--exact", "--package", entry.package, *extras]


def find_uv() -> str:
    """The uv executable. ValueError says how to get it."""
    found = shutil.which("uv")
    if found:
        return found
    try:
        return import_module("uv").find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise ValueError(
            "the server's environment is made by uv, which is not here: pip install uv, or start the server yourself "
            "and name it with generator.inference_engine.external_server_urls=['grpc://host:port']"
        ) from None


def _must_change(entry: ServerEntry, environment: Path, command: list[str]) -> bool:
    """Whether a sync would add, remove or change a distribution.

    uv reinstalls a wheel whose inner tag names another Python on every sync; that alone is no reason to touch files
    that another run may have loaded.
    """
    if not (environment / "bin" / "python").exists():
        return True
    plan = subprocess.run(
        [*command, "--dry-run"], cwd=entry.root, env=_environ(environment), capture_output=True, text=True, timeout=120
    )
    if plan.returncode != 0:
        return True
    changes = [line.strip() for line in plan.stderr.splitlines() if line.strip()[:2] in ("+ ", "- ", "~ ")]
    return any(not line.startswith("~ ") or "(from " in line for line in changes)


def _remove_unfinished(environment: Path) -> None:
    """A uv that is interrupted leaves distributions without their files, and takes them for installed next time."""
    mark = environment.parent / UNFINISHED
    if not mark.exists():
        return
    _end_uv(mark.read_text())
    if environment.exists():
        _refuse_if_in_use(environment)
        log.info("%s was left unfinished when uv was interrupted: it is made anew", environment)
        shutil.rmtree(environment)
    mark.unlink()


def _end_uv(pid: str) -> None:
    """The uv of a run that was killed may still be at work."""
    try:
        process = psutil.Process(int(pid))
        if process.name() == "uv":
            process.kill()
            process.wait(10)
    except (ValueError, psutil.Error):
        return  # it has ended, or had not begun


def _sync(entry: ServerEntry, environment: Path, command: list[str], device: str, on_wait: OnWait) -> None:
    new = not (environment / "bin" / "python").exists()
    size = entry.download_gb.get(device, 0.0)
    if new:
        log.info(
            "the server's environment is not there yet: uv downloads up to %.1f GB and makes %s, once",
            size,
            environment,
        )
    else:
        _refuse_if_in_use(environment)
        log.info("bringing the server's environment %s in line with the lock", environment)
    output, unfinished = environment.parent / "server-sync.log", environment.parent / UNFINISHED
    before, started = _fingerprint(environment, ""), time.monotonic()
    unfinished.touch()
    with output.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=entry.root, env=_environ(environment), stdout=sink, stderr=sink, stdin=subprocess.DEVNULL
        )
        try:
            unfinished.write_text(str(process.pid))
            _wait(process, size if new else 0.0, on_wait)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(10)
    if process.returncode == 0 or _fingerprint(environment, "") == before:
        unfinished.unlink()
    if process.returncode != 0:
        said = "\n".join(f"  | {line}" for line in output.read_text().splitlines()[-20:])
        raise ValueError(f"making the server's environment failed: {' '.join(command)}\n{said}")
    log.info("the server's environment is ready after %.0f s", time.monotonic() - started)


def _wait(process: subprocess.Popen[bytes], size_gb: float, on_wait: OnWait) -> None:
    """Until uv ends, telling how much this machine received meanwhile and how long the rest may take."""
    started, first = time.monotonic(), psutil.net_io_counters().bytes_recv
    while process.poll() is None:
        seconds = time.monotonic() - started
        if seconds > SYNC_TIMEOUT_S:
            raise ValueError(f"uv sync ran for {SYNC_TIMEOUT_S:.0f} s and is stopped")
        received_gb = (psutil.net_io_counters().bytes_recv - first) / 1e9
        on_wait(_progress(seconds, received_gb, size_gb))
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue


def _progress(seconds: float, received_gb: float, size_gb: float) -> str:
    text = f"the server's environment: {seconds:.0f} s"
    if size_gb <= 0:
        return text
    text += f", {received_gb:.1f} of up to {size_gb:.1f} GB received"
    if received_gb > 0.02 * size_gb and received_gb < size_gb:
        text += f", about {seconds * (size_gb / received_gb - 1):.0f} s left"
    return text


def _environ(environment: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")}
    return kept | {"UV_PROJECT_ENVIRONMENT": str(environment)}


@contextmanager
def _locked(path: Path, on_wait: OnWait) -> Iterator[None]:
    """One process at a time; says so while it waits for another."""
    lock, deadline = FileLock(path), time.monotonic() + SYNC_TIMEOUT_S
    while True:
        try:
            lock.acquire(timeout=1.0)
            break
        except Timeout:
            if time.monotonic() > deadline:
                raise ValueError(f"another process has held {path} for {SYNC_TIMEOUT_S:.0f} s") from None
            on_wait("another run that prepares the server's environment")
    try:
        yield
    finally:
        lock.release()


def _hold(environment: Path, kind: int) -> int:
    descriptor = os.open(environment / IN_USE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_if_in_use(environment: Path) -> None:
    try:
        os.close(_hold(environment, fcntl.LOCK_EX))
    except BlockingIOError:
        raise ValueError(
            f"the lock changed and {environment} must change with it, but a server runs from it: end that run first, "
            f"or connect to its server with generator.inference_engine.external_server_urls"
        ) from None
