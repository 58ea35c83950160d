"""A set of processes that an `LLM` starts for itself. Imported only when one is started."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from quire.client import AsyncClient
from quire.llm_sources import Opened
from quire.local import LocalConfig, LocalSet
from quire.models import LocatedModel


class Started:
    """A set of our own.

    Args:
        model: what to serve.
        workers: see LocalConfig.
        tokenizers: see LocalConfig.
        flags: see LocalConfig.
        log_dir: see LocalConfig.
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
        """See Source."""
        self._local = LocalSet(self._config)
        async with self._local as local, AsyncClient(local.target) as client:
            yield Opened(client, self._config.served_model_name, local.failure)

    def hurry(self) -> None:
        """See Source."""
        if self._local is not None:
            self._local.kill()
