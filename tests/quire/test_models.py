"""How what the user typed becomes a folder."""

from pathlib import Path

import pytest

from quire.models import (
    ALIASES,
    DEFAULT_MODEL,
    LocatedModel,
    ModelNotFound,
    find_alias,
    is_hub_id,
    locate_model,
    pulled_models,
    quire_home,
    require_weights,
)

ALIAS = ALIASES[DEFAULT_MODEL]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def put(home: Path, folder: str) -> Path:
    path = home / "models" / folder
    path.mkdir(parents=True)
    return path


def test_the_home_is_where_the_environment_says(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert quire_home() == home
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_HOME", "~/here")
    assert quire_home() == tmp_path / "here"
    monkeypatch.setenv("QUIRE_HOME", "")
    assert quire_home() == tmp_path / ".cache" / "quire"


def test_an_alias_is_found_by_both_of_its_names(home: Path) -> None:
    path = put(home, ALIAS.name)
    for typed in (ALIAS.name, ALIAS.hub_id):
        located = locate_model(typed)
        assert (located.name, located.path) == (ALIAS.name, path)
        assert find_alias(typed) is ALIAS


def test_a_hub_id(home: Path) -> None:
    path = put(home, "owner--some-model")
    located = locate_model("owner/some-model")
    assert (located.name, located.path) == ("owner/some-model", path)


def test_a_name_given_at_the_pull(home: Path) -> None:
    path = put(home, "mine")
    assert locate_model("mine").path == path


def test_a_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed in (str(tmp_path / "some/model"), "some/model", "./some/model", "some/../some/model"):
        located = locate_model(typed)
        assert (located.name, located.path) == ("model", tmp_path / "some" / "model")


def test_a_pulled_folder_keeps_its_name_when_given_as_a_path(home: Path) -> None:
    path = put(home, "owner--some-model")
    assert locate_model(str(path)).name == "owner/some-model"


def test_an_alias_wins_over_a_folder_of_its_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ALIAS.name).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound):
        locate_model(ALIAS.name)
    assert locate_model(f"./{ALIAS.name}").path == tmp_path / ALIAS.name
    path = put(home, ALIAS.name)
    assert locate_model(ALIAS.name).path == path


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (ALIAS.name, f"get it with: quire model pull {ALIAS.name}"),
        (ALIAS.hub_id, f"get it with: quire model pull {ALIAS.name}"),
        ("owner/model", "get it with: quire model pull owner/model"),
        ("nonsense", f"there is no model 'nonsense' here; known names: mine, {ALIAS.name}"),
        ("/no/such", "there is no folder /no/such"),
        ("./no", "there is no folder ./no"),
        ("a/b/c", "there is no folder a/b/c"),
        ("", "the name of the model is empty"),
    ],
)
def test_what_is_not_here_says_what_to_do(home: Path, typed: str, message: str) -> None:
    put(home, "mine")
    with pytest.raises(ModelNotFound) as caught:
        locate_model(typed)
    assert str(caught.value).endswith(message)
    assert "\n" not in str(caught.value)


def test_a_file_must_be_pulled(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    with pytest.raises(ModelNotFound, match=f"quire model pull {file}"):
        locate_model(str(file))


def test_the_list_leaves_out_what_is_still_being_fetched(home: Path) -> None:
    assert pulled_models() == []
    for folder in ("zz", "owner--model", ".pull-abc"):
        put(home, folder)
    (home / "models" / "file").touch()
    assert [model.name for model in pulled_models()] == ["owner/model", "zz"]
    with pytest.raises(ModelNotFound):
        locate_model(".pull-abc")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a/b", True), ("a", False), ("a/b/c", False), ("/a", False), ("a/", False), ("./a", False)],
)
def test_hub_ids(text: str, *, is_one: bool) -> None:
    assert is_hub_id(text) is is_one


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no *.safetensors and no *.gguf in it"),
        (["config.json", "pytorch_model.bin"], "no *.safetensors and no *.gguf in it"),
        (["model.safetensors"], "weights, but no config.json"),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFound) as caught:
        require_weights(LocatedModel(name="m", path=tmp_path))
    assert str(caught.value) == f"{tmp_path} holds no model: {message}"


@pytest.mark.parametrize("files", [["m.gguf"], ["config.json", "model-1-of-2.safetensors"]])
def test_a_folder_with_a_model(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    require_weights(LocatedModel(name="m", path=tmp_path))
