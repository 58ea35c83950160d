"""A journal as it lies on disk: header and entries, read once from front to back."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from services.scheduler import journal_codec as codec


class JournalFile:
    """An open journal; a context manager.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be read.
        JournalError: it is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb")
        try:
            self.header = codec.read_header(self._stream)
        except codec.JournalError:
            self._stream.close()
            raise
        self.ended_well = False
        """Whether the last entry was read and says that the scheduler stopped."""
        self.remark = "cut: its last entry is missing, the scheduler was killed or still runs"
        """What there is to say of its end, once all entries were read; "" after an orderly one."""

    def __enter__(self) -> "JournalFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.close()

    def entries(self) -> Iterator[codec.Entry]:
        """The entries but for the last one, which tells how recording ended.

        Raises:
            JournalError: an entry is damaged, or stands after the last one.
        """
        while True:
            try:
                entry = codec.read_entry(self._stream)
            except EOFError:
                self.remark = "cut within an entry: the scheduler was killed or still runs"
                return
            if entry is None:
                return
            if entry.HasField("close"):
                self.remark = entry.close.message and f"recording failed: {entry.close.message}"
                self.ended_well = not entry.close.message
                return
            yield entry
