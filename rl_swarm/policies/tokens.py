"""Text <-> token ids for a Hugging Face folder, without loading transformers (which takes seconds to import)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rl_swarm.errors import ModelError
from rl_swarm.policies.chat import read_chat_template, read_json, token_text
from rl_swarm.types import Example


class Tokens:
    """A tokenizer and the tokens that end a completion: some models have several, the first is the usual one.

    With `chat`, prompts go through the model's chat template where it has one.
    """

    def __init__(self, folder: Path, *, chat: bool = True) -> None:
        self._tokenizer = _read_tokenizer(folder)
        # Either may be stored with a tokenizer, for other purposes: here every text is taken whole, and as it is.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.ends = _end_tokens(folder, self._tokenizer)
        if max(self.ends) >= self._tokenizer.get_vocab_size():
            raise ModelError(f"{folder}: the end-of-text tokens {self.ends} are not all in the tokenizer's vocabulary.")
        self.chat = read_chat_template(folder) if chat else None

    @property
    def end(self) -> int:
        return self.ends[0]

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode_prompt(self, text: str, examples: Sequence[Example] = ()) -> list[int]:
        """Through the chat template, which brings its own special tokens; else with the token that begins a text.

        Examples are earlier turns of the conversation, or earlier paragraphs of the text.
        """
        if self.chat is not None:
            return list(self._tokenizer.encode(self.chat.render(text, examples), add_special_tokens=False).ids)
        shown = "".join(f"{example.prompt}\n{example.answer}\n\n" for example in examples)
        return list(self._tokenizer.encode(shown + text).ids)

    def encode(self, text: str) -> list[int]:
        """The text alone, as a completion continues it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion; a final end-of-text token leaves no trace in it."""
        return self.decode_all([ids])[0]

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        visible = [list(ids[:-1] if ids and ids[-1] in self.ends else ids) for ids in completions]
        return list(self._tokenizer.decode_batch(visible, skip_special_tokens=False))


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 the library raises bare Exception for every kind of broken file
            raise ModelError(f"{path} cannot be read: {error}.") from None
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")):
        raise ModelError(f"{folder} has no tokenizer: tokenizer.json is missing.")
    # An older form, which transformers knows how to turn into the newer one.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"{folder}: its tokenizer cannot be read: {str(error).strip().splitlines()[0]}") from None
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


def _end_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text, the one that ends a turn first: only the tokenizer's configuration tells it."""
    ends: list[int] = []
    last = read_json(folder / "tokenizer_config.json").get("eos_token")
    turn = tokenizer.token_to_id(token_text(last)) if last else None
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id")
        ends += [found] if isinstance(found, int) else found or []
        if ends:
            break
    if not ends and turn is None:
        raise ModelError(f"{folder} names no end-of-text token (eos_token_id in config.json).")
    return tuple(dict.fromkeys([*([] if turn is None else [turn]), *ends]))
