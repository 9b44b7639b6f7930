"""An index of sizes that finds the smallest one that fits in constant time."""

from __future__ import annotations

_BITS = 10
_MASK = (1 << _BITS) - 1
_LEVELS = 4  # sizes up to 2^40 units


class SizeIndex:
    """A set of numbers from 1 to 2^40 - 1 that finds the smallest one not below a given number.

    A tree of bitmaps: a bit of a word says that the word below it is not empty. Each operation looks at one or two
    words of each level, however many numbers there are.
    """

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words: list[dict[int, int]] = [{} for _ in range(_LEVELS)]

    def add(self, number: int) -> None:
        """Idempotent."""
        for words in self._words:
            bit = 1 << (number & _MASK)
            number >>= _BITS
            word = words.get(number, 0)
            words[number] = word | bit
            if word:
                return  # the levels above know of this word

    def remove(self, number: int) -> None:
        """The number must be in the set."""
        for words in self._words:
            bit = 1 << (number & _MASK)
            number >>= _BITS
            word = words[number] ^ bit
            if word:
                words[number] = word
                return
            del words[number]

    def at_least(self, number: int) -> int | None:
        """The smallest number in the set that is `number` or more; None if there is none."""
        for level, words in enumerate(self._words):
            word = words.get(number >> _BITS, 0) >> (number & _MASK)
            if word:
                number += (word & -word).bit_length() - 1
                while level:
                    level -= 1
                    word = self._words[level][number]
                    number = (number << _BITS) + (word & -word).bit_length() - 1
                return number
            number = (number >> _BITS) + 1
        return None

    def largest(self) -> int:
        """The largest number in the set; 0 if it is empty."""
        number = 0
        for words in reversed(self._words):
            if number not in words:
                return 0  # only on the topmost level: a word of the others is not empty
            number = (number << _BITS) + words[number].bit_length() - 1
        return number
