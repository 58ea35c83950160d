"""What a gateway is told of the model's folder, and what is wrong with one."""

from pathlib import Path

import pytest

from services.chassis.process import StartupError
from services.scheduler.model_folder import read_model_folder
from tests.assets.byte_tokenizer import make_byte_tokenizer


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    folder = read_model_folder(str(make_byte_tokenizer(tmp_path / "m")))
    assert folder.tokenizer_zip
    assert (folder.model_type, folder.architectures) == ("", ())
    assert (folder.bos_token_id, folder.pad_token_id) == (None, None)
    assert folder.sampling.temperature is None


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", r"config\.json: is not JSON"),
        ("config.json", "[]", r"config\.json: must hold a JSON object"),
        ("generation_config.json", '{"top_p": 2}', r"top_p must be in \(0, 1\], got 2"),
    ],
)
def test_a_damaged_file_is_named_with_the_flag(
    tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = make_byte_tokenizer(tmp_path / "m")
    (folder / file).write_text(text)
    with pytest.raises(StartupError, match=rf"^--tokenizer: .*{message}"):
        read_model_folder(str(folder))


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--tokenizer: there is no folder"):
        read_model_folder(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"^--tokenizer: .* holds no tokenizer$"):
        read_model_folder(str(tmp_path))
