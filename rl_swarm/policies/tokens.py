"""Text <-> token ids for a Hugging Face folder, without loading transformers (which takes seconds to import)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rl_swarm.errors import ModelError


class Tokens:
    """A tokenizer and the tokens that end a completion: some models have several, the first is the usual one."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer: tokenizer.json is missing.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 the library raises bare Exception for every kind of broken file
            raise ModelError(f"{path} cannot be read: {error}.") from None
        self.ends = _end_tokens(folder)
        if max(self.ends) >= self._tokenizer.get_vocab_size():
            raise ModelError(f"{folder}: the end-of-text tokens {self.ends} are not all in the tokenizer's vocabulary.")

    @property
    def end(self) -> int:
        return self.ends[0]

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode_prompt(self, text: str) -> list[int]:
        """With the token that begins a text, for models that want one."""
        return list(self._tokenizer.encode(text).ids)

    def encode(self, text: str) -> list[int]:
        """The text alone, as a completion continues it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion; a final end-of-text token leaves no trace in it."""
        return self.decode_all([ids])[0]

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        visible = [list(ids[:-1] if ids and ids[-1] in self.ends else ids) for ids in completions]
        return list(self._tokenizer.decode_batch(visible, skip_special_tokens=False))


def _end_tokens(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            found = json.loads(path.read_text()).get("eos_token_id")
            ends = [found] if isinstance(found, int) else found
            if ends:
                return tuple(int(end) for end in ends)
    raise ModelError(f"{folder} names no end-of-text token (eos_token_id in config.json).")
