import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.tokenizer.encoding import Encoding, load_encoding
from tests.assets.tokenizers import byte_level, write_folder


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
