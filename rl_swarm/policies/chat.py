"""Chat templates: how an instruction-tuned model wants a question put to it.

A template is a small program in the model's folder, in Jinja. It runs in Jinja's sandbox, as everywhere in the field:
it can build text and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_swarm.errors import ModelError
from rl_swarm.types import Example

# Tokens a template may ask for by name.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for trainers that read it off a template: here it is only text."""

    tags = {"generation"}  # noqa: RUF012 declared so by the library

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Puts a question the way the model was taught to expect it, up to where its answer begins."""

    def __init__(self, source: str, tokens: Mapping[str, str], folder: Path) -> None:
        self._tokens, self._folder = tokens, folder
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"{folder}: its chat template cannot be read: {error}. CHAT_TEMPLATE=none does without."
            ) from None
        self.render("1 + 1")  # what cannot be used is better known now

    def render(self, question: str, examples: Sequence[Example] = ()) -> str:
        """The question as the user's turn, after examples as earlier turns, and the opening of the model's own.

        Where a template knows of a thinking phase, it is left out: completions are short here, and what is rewarded is
        the answer.
        """
        turns = [turn for one in examples for turn in (("user", one.prompt), ("assistant", one.answer))]
        try:
            return self._template.render(
                messages=[{"role": role, "content": text} for role, text in [*turns, ("user", question)]],
                add_generation_prompt=True,
                enable_thinking=False,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # noqa: BLE001 a template is a program: it may fail in any way
            raise ModelError(
                f"{self._folder}: its chat template does not take a plain question: {error}. CHAT_TEMPLATE=none does "
                "without."
            ) from None


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder; None for models without, which get the plain text."""
    config = read_json(folder / "tokenizer_config.json")
    separate = folder / "chat_template.jinja"
    source = separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if not source:
        return None
    return ChatTemplate(str(source), {name: token_text(config.get(name)) for name in NAMED_TOKENS}, folder)


def read_json(path: Path) -> dict[str, Any]:
    """One of a model folder's descriptions; nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    return found if isinstance(found, dict) else {}


def token_text(token: Any) -> str:
    """A token is named by its text, or by a table that has it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    # A date in the prompt would make a run of today differ from one of tomorrow.
    return datetime(2026, 1, 1).strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: Jinja's own filter escapes for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
