"""Running sets that tests share, and the oracles that look at them after each test."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from services.worker.engine import Engine
from tests.assets.byte_tokenizer import CHAT_TEMPLATE
from tests.assets.checkpoints import make_successor_checkpoint
from tests.assets.tokenizers import byte_level, sentencepiece_like, write_folder
from tests.behaviour import oracles
from tests.behaviour.pieces import CHAIN_EOS, Pieces, chain
from tests.behaviour.sets import model_stack, scripted_stack
from tests.behaviour.stack import SCRIPTED_LIMITS, STARVED_LIMITS, Stack, load_small_engine


@pytest.fixture(autouse=True)
async def no_leaked_tasks() -> AsyncIterator[None]:
    """As everywhere, but for the task in which each shared server waits for its next call."""
    before = asyncio.all_tasks()
    yield
    for _ in range(100):
        left = [
            task
            for task in asyncio.all_tasks() - before
            if task is not asyncio.current_task()
            and "AioServer._request_registered_call" not in repr(task)
        ]
        if not left:
            return
        await asyncio.sleep(0.01)  # calls that were cut need a moment to unwind
    pytest.fail(f"tasks left running: {sorted(map(repr, left))}")


@pytest.fixture(autouse=True)
async def standing_oracles(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After every test: each set it used is quiet, has lost nothing, and answers rightly."""
    yield
    for value in list(request.node.funcargs.values()):
        # Sets made for one test alone are gone by now, and were looked at before they went.
        if isinstance(value, Stack) and value.is_running:
            if value.script is not None:
                value.script.go_on()
            await oracles.check(value)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are computed fastest by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pieces() -> Pieces:
    """Ids of the tokens that the byte-level tokenizer has beside its bytes."""
    return Pieces(byte_level())


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds nothing to a prompt."""
    folder = tmp_path_factory.mktemp("t") / "bytes"
    return write_folder(folder, byte_level(), template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def bos_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with a token in front of every prompt."""
    folder = tmp_path_factory.mktemp("t") / "bos"
    return write_folder(folder, byte_level(bos=True), template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with words that begin with a space, and tokens for single bytes."""
    folder = tmp_path_factory.mktemp("t") / "words"
    return write_folder(folder, sentencepiece_like(), template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
async def scripted(
    byte_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A roomy set whose worker says what it is told, in bytes."""
    async with scripted_stack(tmp_path_factory.mktemp("s"), byte_folder, SCRIPTED_LIMITS) as stack:
        yield stack


@pytest.fixture(scope="module")
async def scripted_words(
    sentencepiece_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """The same with the tokenizer of words and single bytes."""
    sockets = tmp_path_factory.mktemp("s")
    async with scripted_stack(sockets, sentencepiece_folder, SCRIPTED_LIMITS) as stack:
        yield stack


@pytest.fixture(scope="module")
async def starved(
    byte_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A set with four seats, sixteen blocks of four tokens, and eight tokens a step."""
    async with scripted_stack(tmp_path_factory.mktemp("s"), byte_folder, STARVED_LIMITS) as stack:
        yield stack


@pytest.fixture(scope="session")
def chain_engine(pieces: Pieces, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """A model that says `chain` after a line break; its two configurations differ on the ends."""
    ids = (*pieces("\n"), *chain(pieces))
    folder = make_successor_checkpoint(
        tmp_path_factory.mktemp("m") / "chain",
        successors=dict(itertools.pairwise(ids)),
        tokenizer=byte_level(),
        max_positions=256,
        config_eos=CHAIN_EOS[0],
        generation_eos=CHAIN_EOS,
    )
    return load_small_engine(folder, num_blocks=256), folder


@pytest.fixture(scope="module")
async def successor(
    chain_engine: tuple[Engine, Path], pieces: Pieces, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A set with the model that says `chain`."""
    engine, folder = chain_engine
    canary = (pieces("\n"), chain(pieces)[:6])
    sockets = tmp_path_factory.mktemp("s")
    async with model_stack(sockets, folder, engine, canary) as stack:
        yield stack
