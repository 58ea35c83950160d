"""Temporary folders that belong to one process, and the removal of those it left behind.

A claim is a lock on the folder itself: it survives a rename and ends with the process, however that
ends. Knows nothing of what lies inside. Standard library only.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_YOUNG_S = 2.0
"""A folder this young may belong to a process that is about to claim it."""


@contextlib.contextmanager
def claimed_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, held by this process and removed at the end if it is still there.

    Left-over folders with the same prefix, whose process is gone, are removed first.
    """
    _remove_abandoned(parent, prefix)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Where the file system has no locks, the folder is merely never found abandoned.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
