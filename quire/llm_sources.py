"""Where an `LLM` gets its answers from. Here: a set that others run; one of its own: `llm_set`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from quire.client import AsyncClient
from quire.errors import InvalidRequest, ModelNotFound
from quire.models import find_alias, locate_model


@dataclass(frozen=True, slots=True)
class Opened:
    """What the loop holds while the LLM is open.

    Attributes:
        client: of the set.
        model: name of the model, as it is served.
        lost: runs until the set is lost, and raises why.
    """

    client: AsyncClient
    model: str
    lost: Callable[[], Awaitable[NoReturn]]

    async def watch(self) -> NoReturn:
        """Runs until the set is lost; raises why."""
        await self.lost()
        raise AssertionError("the line above ends only by raising")


class Source(Protocol):
    """A set to talk to."""

    def open(self) -> contextlib.AbstractAsyncContextManager[Opened]:
        """Entered on the loop before the first request, left after the last."""
        ...

    def hurry(self) -> None:
        """Ends at once what leaving would end in order."""
        ...


class Joined:
    """A set that others run."""

    def __init__(self, model: str | None, target: str | Sequence[str]) -> None:
        self._model = model
        self._client = AsyncClient(target)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Opened]:
        """See Source."""
        async with self._client as client:
            info = await client.info()
            if self._model is not None and info.model not in _names_of(self._model):
                raise InvalidRequest(
                    "model", f"is {info.model!r} at {client.target}, and not {self._model!r}"
                )
            yield Opened(client, info.model, _forever)

    def hurry(self) -> None:
        """There is nothing to end."""


async def _forever() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends this wait")


def _names_of(model: str) -> set[str]:
    """Names under which `model` may be served."""
    alias = find_alias(model)
    names = {model} if alias is None else {alias.name, alias.hub_id}
    with contextlib.suppress(ModelNotFound):
        names.add(locate_model(model).name)
    return names
