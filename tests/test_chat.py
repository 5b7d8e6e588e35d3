"""Chat templates render as transformers renders them, and nothing in a template gets out of its sandbox."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from rl_swarm.errors import ModelError
from rl_swarm.models import PICO_FOLDER
from rl_swarm.policies.chat import read_chat_template
from rl_swarm.policies.tokens import Tokens

pytestmark = pytest.mark.torch

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "turns with a system message": CHATML,
    "special tokens by name": "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]{{ eos_token }}",
    "loops that break off": "{% for m in messages %}{{ m.content | trim }}{% break %}{% endfor %}!",
    "json": "{{ messages[0] | tojson }}{{ tools is none }}",
    "a thinking phase": "{{ messages[0].content }}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
    "marks of what the model wrote": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespaces and slices": "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ messages[0]['content'][:4] }}",
}
QUESTION = 'What is 1 < 2 & "3"?\n\n  Put ä between <answer> and </answer>. '


def folder_with(tmp_path: Path, template: Any, **config: Any) -> Path:
    shutil.copytree(PICO_FOLDER, tmp_path, dirs_exist_ok=True)
    known = json.loads((tmp_path / "tokenizer_config.json").read_text())
    known |= {"chat_template": template} if template is not None else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known | config))
    return tmp_path


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_and_encodes_as_in_transformers(template: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, template, bos_token="<pad>")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    chosen: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False}
    tokens = Tokens(folder)
    assert tokens.chat is not None
    assert tokens.chat.render(QUESTION) == reference.apply_chat_template(messages, tokenize=False, **chosen)
    ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **chosen)
    assert tokens.encode_prompt(QUESTION) == list(ids)


def test_a_template_in_a_file_of_its_own_wins_and_several_have_names(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ messages[0].content }}"}]
    folder = folder_with(tmp_path, named)
    template = read_chat_template(folder)
    assert template is not None and template.render("q") == "yes q"
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    template = read_chat_template(folder)
    assert template is not None and template.render("q") == "file q"


def test_without_a_template_or_when_told_so_the_text_goes_in_as_it_is(tmp_path: Path) -> None:
    plain = Tokens(PICO_FOLDER)
    assert plain.chat is None and plain.encode_prompt("1+1=") == plain.encode("1+1=")
    folder = folder_with(tmp_path, CHATML)
    assert Tokens(folder, chat=False).encode_prompt("1+1=") == plain.encode("1+1=")
    assert Tokens(folder).encode_prompt("1+1=") != plain.encode("1+1=")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception('only with a system message') }}",
        "{% for m in messages %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_cannot_or_must_not_be_used_is_one_sentence(template: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template"):
        Tokens(folder_with(tmp_path, template))


def test_a_turn_ends_with_the_tokenizers_own_end_and_all_ends_end(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CHATML, eos_token={"content": "a"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    tokens = Tokens(folder)
    turn = tokens.encode("a")[0]
    assert tokens.ends == (turn, 1, 5) and tokens.end == turn


def test_a_tokenizer_of_the_older_form_is_read_too(tmp_path: Path) -> None:
    """GPT-2's: a vocabulary and merges, without tokenizer.json."""
    words = ["<|endoftext|>", *(chr(code) for code in range(33, 127)), "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: id for id, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}'
    )
    tokens = Tokens(tmp_path)
    assert tokens.decode(tokens.encode("cabd")) == "cabd"
    assert len(tokens.encode("cabd")) == 3


def test_stored_truncation_and_padding_touch_no_text(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(8)
    stored.enable_padding(length=12)
    stored.save(str(folder / "tokenizer.json"))
    text = "123456789012345678"
    assert Tokens(folder).encode_prompt(text) == Tokens(PICO_FOLDER).encode_prompt(text)
    assert len(Tokens(folder).encode("12")) == 2
