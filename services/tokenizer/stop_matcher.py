"""Finds stop strings in text that arrives in pieces. Pure: knows neither tokens nor requests.

Rule: the first string to complete wins, whatever the order of the list; of several that complete at
one character the one that begins earliest wins. Text is held back only while it may still become
part of a stop string, and everything else is released at once.

One Aho-Corasick automaton for all strings: the work per character is constant on average, whatever
the number of strings and the length of the text so far.
"""

from collections import deque
from collections.abc import Iterable


class StopAutomaton:
    """The compiled stop strings; without state of a text, so that one may serve many texts.

    Args:
        stops: the strings, none empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.fail = self._failures()
        self.first_characters = frozenset(self.goto[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.goto[state].get(character)
            if following is None:
                following = len(self.goto)
                self.goto[state][character] = following
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _failures(self) -> list[int]:
        """By state: the state of its longest proper suffix that begins some stop string."""
        fail = [0] * len(self.goto)
        todo = deque(self.goto[0].values())
        while todo:
            state = todo.popleft()
            for character, following in self.goto[state].items():
                todo.append(following)
                fallback = fail[state]
                while fallback and character not in self.goto[fallback]:
                    fallback = fail[fallback]
                fail[following] = self.goto[fallback].get(character, 0)
            # A state that ends no string itself may end a shorter one; its own would begin earlier.
            if self.found[state] is None:
                self.found[state] = self.found[fail[state]]
        return fail

    def step(self, state: int, character: str) -> int:
        """The state after `character`."""
        while True:
            following = self.goto[state].get(character)
            if following is not None:
                return following
            if not state:
                return 0
            state = self.fail[state]


class StopMatcher:
    """Watches one text for stop strings.

    Hidden text (special tokens, which never show in the answer) is looked at only for stop strings
    that name a special token; for the others it is as if it were not there.

    Args:
        visible: strings to look for in the text that shows.
        raw: strings to look for in the text with the hidden parts in it.
        include: whether the string found is released too, its hidden parts included.
    """

    def __init__(
        self, visible: Iterable[str], raw: Iterable[str] = (), *, include: bool = False
    ) -> None:
        self._visible = StopAutomaton(visible)
        self._raw = StopAutomaton(raw)
        self._include = include
        self._visible_state = 0
        self._raw_state = 0
        self._first_characters = self._visible.first_characters | self._raw.first_characters
        self.watches_hidden = bool(self._raw.first_characters)
        self._held = ""
        # Of the last characters of the raw text: 1 where it shows.
        self._shown = bytearray()
        # Whether the text so far ends in the beginning of some string.
        self._inside = False
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes text that shows.

        Returns:
            What can be released; nothing more once a stop string was found.
        """
        if self.found is not None:
            return ""
        if not self._inside and self._first_characters.isdisjoint(text):
            return text
        self._held += text
        start = len(self._held) - len(text)
        for index, character in enumerate(text):
            self._visible_state = self._visible.step(self._visible_state, character)
            visible = self._visible.found[self._visible_state]
            raw = self._step_raw(character, shows=1)
            if visible is not None or raw is not None:
                return self._cut(start + index + 1, visible, raw)
        return self._release()

    def push_hidden(self, text: str) -> str:
        """Takes text that does not show, as `push`."""
        if self.found is not None or not self.watches_hidden:
            return ""
        for character in text:
            raw = self._step_raw(character, shows=0)
            if raw is not None:
                return self._cut(len(self._held), None, raw)
        return self._release()

    def flush(self) -> str:
        """The text still held back, once nothing can follow."""
        text, self._held = self._held, ""
        return text

    def _step_raw(self, character: str, *, shows: int) -> str | None:
        if not self.watches_hidden:
            return None
        self._raw_state = self._raw.step(self._raw_state, character)
        self._shown.append(shows)
        return self._raw.found[self._raw_state]

    def _cut(self, end: int, visible: str | None, raw: str | None) -> str:
        """Ends the text with the match that ends at `end` of the held text, or before it."""
        shown_of_raw = 0 if raw is None else sum(self._shown[-len(raw) :])
        if raw is None or (visible is not None and len(visible) >= shown_of_raw):
            self.found, length = visible, len(visible or "")
        else:
            self.found, length = raw, shown_of_raw
        released = self._held[: end - length]
        if self._include:
            released += self.found or ""
        self._held = ""
        return released

    def _release(self) -> str:
        depth = self._raw.depth[self._raw_state]
        del self._shown[: len(self._shown) - depth]
        self._inside = bool(self._visible_state or self._raw_state)
        hold = max(self._visible.depth[self._visible_state], sum(self._shown))
        cut = len(self._held) - hold
        released, self._held = self._held[:cut], self._held[cut:]
        return released
