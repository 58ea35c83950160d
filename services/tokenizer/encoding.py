"""The model's tokenizer: loads its files, encodes, decodes, and says what it is.

Owns the loaded tokenizer; nothing ever changes it, so its methods may be called from several
threads. They take as long as the text is long: call them through `encoding_pool`, not on the event
loop.

`tokenizer.json` is taken as it stands, by the library's general class: classes made for one family
rebuild the tokenizer from its vocabulary and lose steps of it (GPT-2's forgets to split digits).
No code from the model's folder is run. Needs no torch.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from tokenizers import Tokenizer
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from services.chassis.process import StartupError
from services.tokenizer.chat_template import ChatTemplate, TemplateBroken
from services.tokenizer.detokenizer import Detokenization
from services.tokenizer.domain import ChatMessage, RenderedChat
from services.tokenizer.text_bound import text_bound

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "config.json"
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
_MOST_TOKENS = 2**22

log = logging.getLogger(__name__)


class Encoding:
    """The tokenizer of one model.

    Args:
        tokenizer: as loaded.
        chat_template: of the same tokenizer.
        digest: sha256 of its files, hex.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, chat_template: ChatTemplate, digest: str
    ) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._chat_template = chat_template
        self.digest = digest
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.has_chat_template = chat_template.exists
        self.detokenization = Detokenization(self._backend)
        self.text_bound = text_bound(self._backend)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text.

        Text of a special token in them becomes that token: who sends text writes the whole prompt.

        Args:
            texts: each is encoded by itself.
            add_special_tokens: whether to add what the tokenizer adds to a prompt (BOS …).
        """
        # Of the library's calls only the batch ones let other threads run meanwhile.
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each sequence, all at once; unknown ids give none."""
        decoded: list[str] = self._backend.decode_batch(
            [list(ids) for ids in sequences], skip_special_tokens=skip_special_tokens
        )
        return decoded

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        check: Callable[[str], None] | None = None,
    ) -> RenderedChat:
        """See ChatTemplate.render."""
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, check=check
        )


def load_encoding(folder: Path) -> Encoding:
    """Loads the tokenizer of a model folder.

    Raises:
        StartupError: a file is missing, damaged, or asks for code from the folder; names the file.
    """
    _check_files(folder)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # The library raises bare Exception for a damaged file, and does not say which one it was.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise StartupError(
            f"{folder}: {TOKENIZER_FILE} with {CONFIG_FILE} cannot be loaded: {reason}"
        ) from error
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    try:
        chat_template = ChatTemplate(tokenizer)
    except TemplateBroken as error:
        source = TEMPLATE_FILE if (folder / TEMPLATE_FILE).exists() else CONFIG_FILE
        raise StartupError(f"{folder / source}: the chat template is broken: {error}") from error
    encoding = Encoding(tokenizer, chat_template, _digest(folder))
    _warn_of_tokens_without_weights(folder, encoding.vocab_size)
    return encoding


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        StartupError: the file is missing, or holds no JSON object; names the file.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StartupError(f"{path}: there is no such file; the tokenizer needs it") from error
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: is not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: must hold a JSON object")
    return value


def _check_files(folder: Path) -> None:
    config = read_json(folder / CONFIG_FILE)
    if "auto_map" in config:
        raise StartupError(
            f"{folder / CONFIG_FILE}: auto_map asks for code from the model's folder, which is "
            "never run"
        )
    for name in _LEGACY_FILES:
        if (folder / name).exists():
            read_json(folder / name)
    _check_tokenizer(folder / TOKENIZER_FILE)
    for path in _template_files(folder):
        try:
            path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"{path}: cannot be read as text: {error}") from error


def _check_tokenizer(path: Path) -> None:
    """What the library would die of, or not say in words."""
    content = read_json(path)
    model, added = content.get("model"), content.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(added, list):
        wrong = "added_tokens" if isinstance(model, dict) else "model"
        raise StartupError(
            f"{path}: is not the file of a tokenizer: {wrong} is missing or of the wrong kind"
        )
    vocab = model.get("vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    for index in ids:
        # The library makes room for every id up to the highest.
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < _MOST_TOKENS:
            raise StartupError(
                f"{path}: token ids must be in 0..{_MOST_TOKENS - 1}, got {shown(index)}"
            )


def _warn_of_tokens_without_weights(folder: Path, vocab_size: int) -> None:
    path = folder / MODEL_FILE
    rows = read_json(path).get("vocab_size") if path.is_file() else None
    if isinstance(rows, int) and rows < vocab_size:
        log.warning(
            "%s has %d tokens, the model only %d (%s): prompts with the others will be refused",
            folder / TOKENIZER_FILE,
            vocab_size,
            rows,
            MODEL_FILE,
        )


def _template_files(folder: Path) -> Iterator[Path]:
    if (folder / TEMPLATE_FILE).exists():
        yield folder / TEMPLATE_FILE
    yield from sorted((folder / "additional_chat_templates").glob("*.jinja"))


def _digest(folder: Path) -> str:
    """sha256 over name and contents of every file that the tokenizer consists of."""
    digest = hashlib.sha256()
    names = [folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, *_LEGACY_FILES)]
    for path in [*(path for path in names if path.exists()), *_template_files(folder)]:
        data = path.read_bytes()
        digest.update(f"{path.name}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()
