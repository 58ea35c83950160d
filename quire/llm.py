"""`LLM`: a model as an object, for scripts without an event loop.

Starts a whole set on this machine, or joins one that runs, and answers batches of prompts. Owns a
background thread with the loop on which the set and the client live; loads no model itself.
"""

import contextlib
import importlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, overload

from quire.answers import RequestOutput
from quire.batch import Ask, Mailbox, answer_all
from quire.errors import InvalidRequest
from quire.llm_inputs import (
    Message,
    Params,
    Prompt,
    Schedulings,
    asks_of_chats,
    asks_of_prompts,
)
from quire.llm_sources import Joined, Source
from quire.loop_thread import LoopThread
from quire.models import DEFAULT_MODEL, locate_model
from quire.set_options import flags_of, keyword

_CLOSED = "this LLM is closed; make another one"


class LLM:
    """A model that answers batches of prompts.

        with LLM("smollm2-135m-instruct") as llm:
            for output in llm.generate(["One, two,", "Red, green,"], SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Starts scheduler, workers and tokenizers as processes of this machine, and ends them when the
    `with` or the program ends, whatever ends it. With `target` it uses a set that runs already, and
    leaves it running. All methods may be called from any thread, also one whose event loop runs
    (which then stands still meanwhile), but in no forked child of the process. Importing this or
    making one loads no torch here.

    Args:
        model: an alias or a hub id that was pulled, or a model folder; absent: the demo model. With
            `target`: what must be served there; absent: whatever is.
        target: address of a running set, or several of its tokenizers joined by commas.
        workers: how many processes with the model to start.
        tokenizers: how many tokenizer processes to start.
        log_dir: where the processes' logs go; absent: nowhere that outlives the set.
        settings: of the set, as `quire up` takes them: dtype, device, max_model_len, max_num_seqs,
            max_num_batched_tokens, prefill_chunk_size, block_size, kv_cache_memory,
            gpu_memory_utilization, enable_prefix_caching, prefix_caching_hash_algo,
            prefix_caching_hash_key, scheduling_policy, tpot_target, max_queued_requests and what
            else `quire up --help` lists. None leaves a choice to the service. Those of later
            versions are refused unless they ask for nothing.

    Raises:
        ModelNotFound: the model is not on this machine.
        NotSupported: a setting belongs to a later version; names it.
        UnknownSetting: there is no setting of that name.
        InvalidRequest: a setting does not fit, or another model is served at `target`.
        SetFailed: the set could not be started; says why.
        Unreachable: nobody is at `target`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        target: str | Sequence[str] | None = None,
        workers: int = 1,
        tokenizers: int = 1,
        log_dir: str | PathLike[str] | None = None,
        **settings: object,
    ) -> None:
        name = None if model is None else fspath(model)
        flags = flags_of(settings)
        source: Source
        if target is not None:
            own = {"workers": workers != 1, "tokenizers": tokenizers != 1}
            own |= {"log_dir": log_dir is not None}
            _refuse_with_target([key for key, given in own.items() if given], flags)
            source = Joined(name, target)
        else:
            # What starts processes takes a while to import, and who joins a set needs none of it.
            source = importlib.import_module("quire.llm_set").Started(
                locate_model(DEFAULT_MODEL if name is None else name),
                workers=workers,
                tokenizers=tokenizers,
                flags=flags,
                log_dir=None if log_dir is None else Path(log_dir),
            )
        self._thread = LoopThread(source.open, hurry=source.hurry, closed=_CLOSED)
        # Runs when the object goes, or before that when the interpreter ends.
        self._finalizer = weakref.finalize(self, self._thread.stop)
        try:
            opened = self._thread.start()
        except BaseException:
            self.close()
            raise
        self.target = opened.client.target
        """Addresses of the tokenizers, joined by commas; for `AsyncClient` and `quire chat`."""
        self.model = opened.model
        """Name of the model, as it is served."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cuts what runs and ends the processes that were started. May be called again."""
        self._finalizer()

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: Literal[True],
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Completes prompts, at most 256 of them at a time.

        A server that has no room is asked again when it says, so that a batch may be larger than
        its queue; not so one that shed a request which said `shed_late`.

        Args:
            prompts: one or several; each is text, token ids, or a mapping with `prompt` or
                `prompt_token_ids`.
            sampling_params: for all of them, or a list with one for each; None, also in the list:
                SamplingParams(max_tokens=512).
            scheduling: how urgent they are, likewise; None: as all others. A deadline counts from
                when its own request is first asked.
            streaming: hands out answers while they grow.

        Returns:
            One output for each prompt, in their order. With `streaming` an iterator of outputs as
            they are so far, of all prompts mixed (`index` tells which); the last one of each is
            `finished`. Nothing is asked before its first step; closing it cuts the rest.

        Raises:
            InvalidRequest: a prompt is wrong; names it. The other requests of the call are cut.
            ServerError: a request failed, likewise.
            SetFailed: the set is lost.
            QuireError: it is closed.
        """
        return self._answer(asks_of_prompts(prompts, sampling_params, scheduling), streaming)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: Literal[True],
    ) -> Iterator[RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        scheduling: Schedulings = None,
        streaming: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answers conversations; otherwise like `generate`.

        Args:
            messages: one conversation or a list of them; each is a list of messages, as
                `ChatMessage` or as `{"role": …, "content": …}`.
            sampling_params: see `generate`.
            scheduling: see `generate`.
            streaming: see `generate`.

        Returns:
            See `generate`; an error names `messages[i]`.
        """
        return self._answer(asks_of_chats(messages, sampling_params, scheduling), streaming)

    def _answer(
        self, asks: Sequence[Ask], streaming: bool
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        if streaming:
            return self._outputs(asks, partial=True)
        with contextlib.closing(self._outputs(asks, partial=False)) as outputs:
            return sorted(outputs, key=lambda output: output.index)

    def _outputs(
        self, asks: Sequence[Ask], *, partial: bool
    ) -> Generator[RequestOutput, None, None]:
        mailbox = Mailbox(partial=partial)
        job = self._thread.run(lambda opened: answer_all(opened.client, asks, mailbox))
        job.outcome.add_done_callback(mailbox.wake)
        try:
            while (output := mailbox.take(job)) is not None:
                yield output
                self._thread.check_process()
        finally:
            job.cancel()


def _refuse_with_target(own: Sequence[str], flags: Mapping[str, Sequence[str]]) -> None:
    """Raises InvalidRequest where a setting was given for a set that runs already."""
    passed = [flag.partition("=")[0] for several in flags.values() for flag in several]
    for name in (*own, *map(keyword, passed)):
        raise InvalidRequest(name, "is a setting of a set that is started, and target names one")
