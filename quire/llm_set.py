"""A set of processes that an `LLM` starts for itself. Imported only when one is started."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from quire.client import AsyncClient
from quire.errors import InvalidRequest, SetFailed
from quire.llm_sources import Opened
from quire.local import LocalConfig, LocalSet, WrongSettings
from quire.models import LocatedModel, require_weights
from quire.set_options import in_keywords, keyword


class Started:
    """A set of our own.

    Args:
        model: what to serve.
        workers: see LocalConfig.
        tokenizers: see LocalConfig.
        flags: see LocalConfig.
        log_dir: see LocalConfig.

    Raises:
        ModelNotFound: the model's folder holds none.
    """

    def __init__(
        self,
        model: LocatedModel,
        *,
        workers: int,
        tokenizers: int,
        flags: Mapping[str, Sequence[str]],
        log_dir: Path | None,
    ) -> None:
        require_weights(model)
        self._config = LocalConfig(
            model=model.path,
            served_model_name=model.name,
            port=0,
            workers=workers,
            tokenizers=tokenizers,
            flags=flags,
            log_dir=log_dir,
        )
        self._local: LocalSet | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Opened]:
        """See Source.

        Raises:
            InvalidRequest: settings do not fit; names them.
            SetFailed: the set could not be started.
        """
        self._local = LocalSet(self._config)
        async with contextlib.AsyncExitStack() as stack:
            try:
                local = await stack.enter_async_context(self._local)
            except WrongSettings as error:
                raise _refusal(error) from error
            except SetFailed as error:
                raise SetFailed(in_keywords(error.message)) from error
            client = await stack.enter_async_context(AsyncClient(local.target))
            yield Opened(client, self._config.served_model_name, local.failure)

    def hurry(self) -> None:
        """See Source."""
        if self._local is not None:
            self._local.kill()


def _refusal(error: WrongSettings) -> InvalidRequest | SetFailed:
    """The same in the words of `LLM`: keywords for flags."""
    fields = [_field_of(problem) for problem in error.problems]
    if not any(field for field, _ in fields):
        return SetFailed(error.message)
    (field, text), *others = fields
    return InvalidRequest(field, text, *others)


def _field_of(problem: str) -> tuple[str, str]:
    """Field and description; an empty field where the problem is not about one flag."""
    flag, _, text = problem.partition(" ")
    return (keyword(flag), in_keywords(text)) if flag.startswith("--") else ("", problem)
