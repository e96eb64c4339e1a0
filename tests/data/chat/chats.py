"""A small tokenizer with chat templates, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# With tools and a system text, and text of the assistant's in several marked parts.
TOOLS = """\
{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{% for message in messages %}
{% if message['role'] == 'assistant' %}
[{{ loop.index0 }}] {% generation %}{% if message.tool_calls %}{{ message.tool_calls | tojson }}
{% endif %}
{% if message.content %}{{ message.content | trim }}{% endif %}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message['role'] | upper }}: {{ message['content'] }}
{% endif %}
{% endfor %}
"""
UNMARKED = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}],
    [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f642?"},
        {"role": "assistant", "content": " \U0001f642 \u6f22\u5b57, yes  \n\n"},
    ],
    [
        {"role": "user", "content": "a\n\nb <b>&amp;"},
        {"role": "assistant", "content": "x" * 40},
        {"role": "assistant", "content": "and more"},
        {"role": "user", "content": "bye"},
    ],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "so?"}],
]


def train(folder: Path) -> Tokenizer:
    """A byte-level tokenizer that splits what it did not see into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["hello to you, answer user assistant system\n", "and more and four and yes\n"] * 4
    tokenizer.train_from_iterator(text, trainer=trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_tokenizer(folder: Path, template: str | None = CHATML, **more: object) -> Path:
    """A tokenizer's folder as Hugging Face has it."""
    train(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "pad_token": None,
        **more,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path
