"""A tokenizer's chat template is found wherever its folder has it, or its absence is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from phalanx.data import DataError
from phalanx.data.chat.template import ChatTemplate, load_template
from tests.data.chat.chats import CHATML, CONVERSATIONS, write_tokenizer


def test_a_file_beside_the_tokenizer_comes_before_its_configuration(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "old")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert load_template(folder).text == CHATML
    other = tmp_path / "other.jinja"
    other.write_text("mine {{ eos_token }}{{ bos_token }}", encoding="utf-8")
    assert load_template(folder, other).render([]).text == "mine <|im_end|><|endoftext|>"


def test_of_templates_by_name_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}]
    assert load_template(write_tokenizer(tmp_path, None, chat_template=named)).text == CHATML


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template.*--template"), ("{% for %}", "no template that Jinja can read")],
)
def test_what_is_no_template_is_named(tmp_path: Path, template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_template(write_tokenizer(tmp_path, template))


def test_a_folder_that_is_no_tokenizers_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer_config\.json.*Hugging Face tokenizer"):
        load_template(tmp_path)


def test_a_template_runs_in_a_sandbox_and_may_refuse() -> None:
    with pytest.raises(SecurityError):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([])
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="roles must alternate"):
        refusing.render(CONVERSATIONS[0])


def test_the_date_of_today_is_unknown_to_it() -> None:
    text = "{% if strftime_now is defined %}today{% else %}26 Jul 2024{% endif %}"
    assert ChatTemplate(text, {}).render([]).text == "26 Jul 2024"
