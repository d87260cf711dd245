"""A suffix automaton of several texts that grow at their ends: where the end of one has stood before.

Blumer et al. 1985, for more than one text: a text's next token is added behind the state of the whole text so far,
whichever text has added tokens meanwhile. A token costs O(1) on average over all that were added, in time and memory.
"""

from array import array
from typing import NamedTuple

ROOT = 0
_NONE = -1


class Match(NamedTuple):
    """The last `length` tokens of a text stand in text number `text`, too, and end there before token `end`: the latest
    place where they stood before, and the first."""

    length: int
    text: int
    end: int
    first_text: int
    first_end: int


NOTHING = Match(0, 0, 0, 0, 0)


class Suffixes:
    """States are numbers: sets of substrings that end at the same places. Most have one transition, in two arrays;
    those of more have a dictionary."""

    __slots__ = ("_end", "_first_end", "_first_text", "_length", "_link", "_more", "_target", "_text", "_token")

    def __init__(self):
        self._length, self._link = array("i", [0]), array("i", [_NONE])
        self._token, self._target = array("i", [_NONE]), array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        self._text, self._end = array("i", [0]), array("i", [0])  # where each state was last found to end ...
        self._first_text, self._first_end = array("i", [0]), array("i", [0])  # ... and first

    def __len__(self) -> int:
        return len(self._length)

    def extend(self, state: int, token: int, text: int, end: int) -> tuple[int, Match]:
        """Add token `end - 1` of a text behind its state. Returns the text's new state, and where its longest end that
        has stood anywhere before stood last."""
        known = self._follow(state, token)
        if known != _NONE:  # all of this text is the beginning, or a part, of another
            if self._length[known] != self._length[state] + 1:
                known = self._split(state, token, known)
            repeated, new = known, known
        else:
            new = self._add(self._length[state] + 1, _NONE, text, end, text, end)
            while state != _NONE and (known := self._follow(state, token)) == _NONE:
                self._connect(state, token, new)
                state = self._link[state]
            if state == _NONE:
                repeated = ROOT
            elif self._length[known] == self._length[state] + 1:
                repeated = known
            else:
                repeated = self._split(state, token, known)
            self._link[new] = repeated
        first = self._first_text[repeated], self._first_end[repeated]
        found = Match(self._length[repeated], self._text[repeated], self._end[repeated], *first)
        self._text[repeated], self._end[repeated] = text, end
        return new, found

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def _connect(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _add(self, length: int, link: int, text: int, end: int, first_text: int, first_end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._token.append(_NONE)
        self._target.append(_NONE)
        self._text.append(text)
        self._end.append(end)
        self._first_text.append(first_text)
        self._first_end.append(first_end)
        return len(self._length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        """What `state` leads to by `token` has longer substrings too, which do not end wherever these do."""
        places = (at[target] for at in (self._text, self._end, self._first_text, self._first_end))
        shorter = self._add(self._length[state] + 1, self._link[target], *places)
        self._token[shorter], self._target[shorter] = self._token[target], self._target[target]
        if target in self._more:
            self._more[shorter] = dict(self._more[target])
        self._link[target] = shorter
        while state != _NONE and self._follow(state, token) == target:
            self._connect(state, token, shorter)
            state = self._link[state]
        return shorter
