"""The file of a recording: one thread writes what the event loop hands over.

The event loop never waits for the disk. Where the file cannot be written, or not as fast as entries
come, recording ends with an error in the log and a last entry that says so; serving goes on.
"""

import errno
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path

from google.protobuf.message import Message

from services.scheduler import journal_codec as codec
from services.scheduler.journal_digest import Answer

log = logging.getLogger(__name__)

_WRITE_EVERY_S = 0.25
"""What a process that is killed may lose."""
_MAX_PENDING_BYTES = 64 << 20
"""Entries that wait for the disk before recording ends."""
_ENTRY_BYTES = 128
_CHUNK_BYTES = 1 << 20
_CLOSE_BYTES = 256
_CLOSE_WITHIN_S = 10.0


class Journal:
    """An open recording. `put` and `close` belong to one thread.

    A file that exists is kept: the recording goes to the first free of `path`, `path.1`, `path.2`
    and so on.

    Args:
        path: of the file.
        header: its first message.
        max_pending_bytes: entries that may wait for the disk.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self, path: Path, header: codec.Header, max_pending_bytes: int = _MAX_PENDING_BYTES
    ) -> None:
        self.path, self._file = _create(path)
        self.is_open = True
        """Whether entries are still taken."""
        self._max_pending = max_pending_bytes
        self._pending: deque[tuple[codec.Entry, Answer, int]] = (
            deque()
        )  # bounded in bytes, by `put`
        # Each is written by one thread alone; their difference is what waits.
        self._bytes_put = self._bytes_taken = 0
        self._last_now = header.started
        self._problem = ""
        self._whole = 0
        """Length of the file up to its last whole entry."""
        self._closing = threading.Event()
        try:
            self._write([header])
        except OSError:
            os.close(self._file)
            raise
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, entry: codec.Entry, answer: Answer, payload: int = 0) -> None:
        """Takes an entry; it is in the file a moment later.

        Args:
            entry: without the answer.
            answer: of the core.
            payload: bytes of what the entry carries beyond some hundred and those of the answer.
        """
        if not self.is_open:
            return
        size = _ENTRY_BYTES + 2 * len(answer.canonical) + payload
        if self._bytes_put - self._bytes_taken + size > self._max_pending:
            self.fail(f"the disk is too slow: {self._max_pending} bytes wait to be written")
            return
        self._bytes_put += size
        self._last_now = entry.now
        self._pending.append((entry, answer, size))

    def fail(self, problem: str) -> None:
        """Ends the recording; the last entry says why."""
        if self.is_open:
            self.is_open = False
            self._problem = problem
            log.error("recording to %s ends here, serving goes on: %s", self.path, problem)
            self._closing.set()

    def close(self) -> None:
        """Writes what is left and the last entry."""
        self.is_open = False
        self._closing.set()
        self._thread.join(_CLOSE_WITHIN_S)
        if self._thread.is_alive():
            log.error("recording to %s is cut: the disk does not take it", self.path)

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(_WRITE_EVERY_S)
                self._write_pending()
            self._write([codec.close_entry(self._last_now, self._problem)])
        except OSError as error:
            self._cut(error.strerror or str(error))
        finally:
            os.close(self._file)

    def _write_pending(self) -> None:
        while self._pending:
            batch: list[Message] = []
            size = 0
            while self._pending and size < _CHUNK_BYTES:
                entry, answer, entry_size = self._pending.popleft()
                codec.seal(entry, answer)
                batch.append(entry)
                size += entry_size
            self._write(batch)
            self._bytes_taken += size

    def _write(self, messages: list[Message]) -> None:
        """Appends whole messages, or raises OSError and has noted how many are whole."""
        data = bytearray()
        ends = []
        for message in messages:
            payload = codec.payload_of(message)
            data += _size_prefix(len(payload))
            data += payload
            ends.append(len(data))
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, memoryview(data)[written:])
        except OSError:
            # What the last ones took is left to the entry that says why the file ends.
            written -= _CLOSE_BYTES
            raise
        finally:
            self._whole += max((end for end in ends if end <= written), default=0)

    def _cut(self, problem: str) -> None:
        """Ends the recording at its last whole entry, if the disk lets us say so."""
        self.is_open = False
        self._pending.clear()
        log.error("recording to %s ends here, serving goes on: %s", self.path, problem)
        try:
            os.ftruncate(self._file, self._whole)
            os.lseek(self._file, self._whole, os.SEEK_SET)
            self._write([codec.close_entry(self._last_now, problem)])
        except OSError as error:
            log.error("the end of %s could not be marked: %s", self.path, error)


def _size_prefix(size: int) -> bytes:
    """A varint, as `google.protobuf.proto` writes it, which makes an encoder anew for each."""
    prefix = bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def clocks() -> tuple[int, int]:
    """Microseconds since 1970, and the same instant on the clock of the engine loop."""
    return time.time_ns() // 1000, time.monotonic_ns() // 1000


def _create(path: Path) -> tuple[Path, int]:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    number = 0
    while True:
        free = path if not number else path.with_name(f"{path.name}.{number}")
        try:
            return free, os.open(free, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            number += 1
