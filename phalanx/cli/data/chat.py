"""``phalanx data chat`` and ``preferences``: samples out of conversations and pairs of answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.data.corpus_tables import bar
from phalanx.cli.data.maintain import in_words
from phalanx.cli.options import Json
from phalanx.cli.output import print_json

if TYPE_CHECKING:
    from phalanx.data.chat.run import ChatOptions, PreparedChat

_NAMED = 10  # lines left out that are printed

Lines = Annotated[list[Path], typer.Argument(help="JSONL files, or folders of them.")]
Out = Annotated[Path, typer.Option(help="Folder that receives the shards.")]
TokenizerFolder = Annotated[
    Path, typer.Option("--tokenizer", help="Folder of a Hugging Face tokenizer with its template.")
]
Sequence = Annotated[
    int, typer.Option(min=2, help="Tokens of a sample: data.sequence of the job that reads it.")
]
Template = Annotated[
    Path | None, typer.Option(help="Use this Jinja chat template instead of the tokenizer's.")
]
Answers = Annotated[
    str,
    typer.Option(
        help="What is an answer: between the template's generation `markers`, or what each "
        "assistant's message adds to the text before it (`turns`)."
    ),
]
Pack = Annotated[bool, typer.Option(help="Put several documents into one sample.")]
ShardSize = Annotated[int, typer.Option(min=1, help="Size of a shard, in MiB.")]
MostUnreadable = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the lines that may be left out.")
]
Force = Annotated[bool, typer.Option(help="Replace the corpus in OUT.")]


MessagesKey = Annotated[str, typer.Option(help="JSON key of a conversation's list of messages.")]
MESSAGES = "messages"


def _samples(pairs: bool) -> Callable[..., None]:
    """The command for conversations, or for pairs of answers: both take the same."""

    def command(
        inputs: Lines,
        out: Out,
        tokenizer: TokenizerFolder,
        sequence: Sequence,
        template: Template = None,
        answers: Answers = "markers",
        pack: Pack = True,
        messages_key: MessagesKey = MESSAGES,
        shard_mb: ShardSize = 256,
        most_unreadable: MostUnreadable = 0.05,
        force: Force = False,
        json: Json = False,
    ) -> None:
        from phalanx.data.chat.run import ChatOptions

        if pairs and messages_key != MESSAGES:
            raise typer.BadParameter("--messages-key is for conversations: pairs have `chosen`")
        options = ChatOptions(
            sequence=sequence,
            pairs=pairs,
            pack=pack,
            messages_key=messages_key,
            file_bytes=shard_mb << 20,
            replace=force,
            inputs=tuple(map(str, inputs)),
            most_unreadable=most_unreadable,
        )
        _prepare(inputs, out, tokenizer, template, answers, options, json)

    return command


def _prepare(
    inputs: list[Path],
    out: Path,
    tokenizer: Path,
    template: Path | None,
    answers: str,
    options: ChatOptions,
    json: bool,
) -> None:
    from phalanx.data.chat.encode import AnswerRule, ChatEncoder
    from phalanx.data.chat.records import CHAT_SUFFIXES
    from phalanx.data.chat.run import prepare_chat
    from phalanx.data.errors import DataError
    from phalanx.data.tokenize.inputs import find_files

    with in_words(json), bar("prepare", quiet=json) as (progress, task):
        if answers not in list(AnswerRule):
            rule = "must be one of " + ", ".join(AnswerRule)
            raise DataError("answers", answers, rule, "leave it out where the template has markers")
        files = find_files(inputs, CHAT_SUFFIXES)
        encoder = ChatEncoder(tokenizer, template, AnswerRule(answers))
        done = prepare_chat(
            files, encoder, out, options, lambda records: progress.advance(task, records)
        )
    if json:
        print_json({"out": str(out), **_report(done)})
        return
    _print(out, files, done)


def _report(done: PreparedChat) -> dict[str, object]:
    manifest = done.manifest
    return {
        "documents": manifest.documents,
        "samples": done.samples,
        "sequence": manifest.packed,
        "tokens": manifest.tokens,
        "labels": done.labels,
        "padding": done.padding,
        "unreadable": manifest.source.unreadable,
        "vocab": manifest.vocab,
    }


def _print(out: Path, files: list[Path], done: PreparedChat) -> None:
    manifest = done.manifest
    what, count = "conversations", manifest.documents
    if manifest.pairs:
        what, count = "pairs of answers", manifest.documents // 2
    labels, padding = done.labels / manifest.tokens, done.padding / manifest.tokens
    print(
        f"{out}: {count:,} {what} in {done.samples:,} samples of {manifest.packed:,} tokens; "
        f"{labels:.1%} are labels, {padding:.1%} padding"
    )
    for each in done.unreadable[:_NAMED]:
        print(f"left out: {files[each.file]}:{each.line}: {each.reason}")
    if manifest.source.unreadable > _NAMED:
        print(f"left out: {manifest.source.unreadable:,} lines, listed in {out}/unreadable.jsonl")


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(
        "chat",
        help="Turn conversations into samples in which only the assistant's tokens are labels.",
    )(_samples(pairs=False))
    app.command(
        "preferences",
        help="Turn pairs of answers, `chosen` and `rejected` (to `prompt`), into samples for DPO.",
    )(_samples(pairs=True))
