import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.encoding import Encoding, load_encoding
from tests.assets.tokenizers import byte_level, write_folder
from tests.services.tokenizer.harness import text_service


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="quire") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer and the template of the demo model."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", byte_level())


@pytest.fixture(scope="session")
def encoding(folder: Path) -> Encoding:
    return load_encoding(folder)


@pytest.fixture
async def service(encoding: Encoding, sockets: Path) -> AsyncIterator[Any]:
    """Gives a context manager, so that a test opens and closes it in one task."""
    return lambda **kwargs: text_service(encoding, sockets, **kwargs)
