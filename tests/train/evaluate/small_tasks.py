"""Tasks of lm-evaluation-harness whose data lie beside them: nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path

HEAD = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {kind}
"""
CHOICE = """
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
WRITING = """
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["z"]
  max_gen_toks: 6
metric_list:
  - metric: exact_match
"""
QUESTIONS = (
    {"text": "the quick brown", "choices": ["fox", "dog"], "right": 0, "answer": "fox"},
    {"text": "jumps over the lazy", "choices": ["fox", "dog"], "right": 1, "answer": "dog"},
    {"text": "the quick " * 12, "choices": ["brown fox jumps", "lazy"], "right": 0, "answer": "a"},
)
KINDS = {
    "animals": ("multiple_choice", CHOICE),
    "fables": ("loglikelihood_rolling", ROLLING),
    "endings": ("generate_until", WRITING),
}


def write_tasks(folder: Path) -> Path:
    """A folder of three tasks, one of each kind of request."""
    tasks = folder / "tasks"
    tasks.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, (kind, rest) in KINDS.items():
        text = HEAD.format(name=name, data=data, kind=kind) + rest
        (tasks / f"{name}.yaml").write_text(text)
    return tasks
