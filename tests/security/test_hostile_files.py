"""Checkpoints, corpora and models of strangers run nothing and reach nothing outside."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from phalanx.checkpoint import Checkpointer, Extra
from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    BadCheckpointError,
    encode,
    read_manifest,
)
from phalanx.checkpoint.tools.dcp import DCP_FILE, import_dcp
from phalanx.data import Cursor
from phalanx.data.tokenize.archives import tar_pieces
from phalanx.model.hf import INDEX_FILE, HfError, load_hf

METADATA = "torch.distributed.checkpoint.metadata"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A DCP folder as torch writes it."""
    found = tmp_path / "dcp"
    state = {"model.w": torch.arange(6.0).view(2, 3), "n": 5, "model.deep": {"b": torch.ones(4)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save_dcp(state, checkpoint_id=found, no_dist=True)
    return found


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def named(module: str, name: str, *arguments: str) -> bytes:
    """A pickle that calls what a module has under a name, dots and all."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in arguments)
    start = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)
    )
    return start + b"\x93(" + words + b"tR."


def refused(folder: Path, content: bytes, words: str) -> None:
    (folder / DCP_FILE).write_bytes(content)
    with pytest.raises(BadCheckpointError, match=words):
        import_dcp(folder, folder.parent / "out")


def test_a_dcp_folder_of_torch_is_read(folder: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    import_dcp(folder, tmp_path / "out", note=notes.append)
    assert any("n" in note for note in notes if "no tensors" in note)


def test_metadata_that_would_call_something_calls_nothing(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    order = f"touch {mark}"
    for payload in (
        Calls(os.system, order),
        Calls(eval, f"open({str(mark)!r}, 'w')"),
        Calls(exec, f"open({str(mark)!r}, 'w')"),
        {"state_dict_metadata": Calls(os.system, order)},
        [Calls(getattr, os, "system")],
    ):
        for protocol in range(6):
            try:
                content = pickle.dumps(payload, protocol)
            except (TypeError, pickle.PicklingError):  # a module has no pickle
                continue
            refused(folder, content, "nothing of it was run|cannot be read|Metadata")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        (METADATA, "os.system"),  # an attribute of what torch's own module has imported
        (METADATA, "Metadata.__init__.__globals__"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch", "os.system"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("builtins", "eval"),
        ("builtins", "__import__"),
        ("copyreg", "_reconstructor"),
        ("functools", "partial"),
    ],
)
def test_a_name_beside_torchs_own_is_refused(
    folder: Path, tmp_path: Path, module: str, name: str
) -> None:
    mark = tmp_path / "mark"
    refused(folder, named(module, name, f"touch {mark}"), f"names {module}")
    assert not mark.exists()


def test_a_name_that_is_known_does_nothing_either(folder: Path) -> None:
    """``getattr`` and torch's classes stand for records: what a file calls is kept, not called."""
    refused(folder, named("builtins", "getattr", "a", "upper"), "has a getattr where a Metadata")
    refused(folder, named("pathlib", "PosixPath", "/"), "has a PosixPath where a Metadata")
    # A state for the class itself, with a field and with a method of its own.
    build = b"\x80\x04\x8c%c%s\x8c\x08Metadata\x93}\x8c\x07version\x8c\x04evilsb." % (
        len(METADATA),
        METADATA.encode(),
    )
    refused(folder, build, "cannot be read")
    assert getattr(Metadata, "version", None) is None


def test_metadata_that_is_cut_off_or_asks_for_the_moon_ends_in_words(folder: Path) -> None:
    whole = (folder / DCP_FILE).read_bytes()
    for length in (0, 1, 2, 11, len(whole) // 2, len(whole) - 1):
        refused(folder, whole[:length], "cannot be read")
    # The 4,294,967,295th entry of a table of what was read; a text of as many letters.
    refused(folder, b"\x80\x04Nr\xff\xff\xff\xff.", "where a Metadata belongs")
    refused(folder, b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.", "cannot be read")
    refused(folder, b"\x80\x04" + b"(" * 100_000 + b".", "cannot be read|belongs")


def rewritten(folder: Path, change: Callable[[Any], None]) -> bytes:
    """The folder's metadata after a change."""
    metadata = pickle.loads((folder / DCP_FILE).read_bytes())
    change(metadata)
    return pickle.dumps(metadata)


def test_sizes_that_contradict_the_files_are_refused_before_memory_is_asked_for(
    folder: Path,
) -> None:
    def huge(metadata: Any) -> None:
        item = metadata.state_dict_metadata["model.w"]
        item.size = item.chunks[0].sizes = torch.Size([1 << 40, 3])

    refused(
        folder, rewritten(folder, huge), "says that model.w has .* all files of the folder have"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda item: item.chunks.clear(), "do not make up the whole"),
        (lambda item: setattr(item.chunks[0], "offsets", torch.Size([1, 0])), "lies outside"),
        (lambda item: setattr(item, "size", (2, True)), "no size"),
        (lambda item: setattr(item, "size", (-2, -3)), "no size"),
        (lambda item: setattr(item, "size", "many"), "no sizes"),
        (lambda item: setattr(item, "properties", None), "nothing of the kind"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[Any], None], words: str
) -> None:
    refused(folder, rewritten(folder, lambda m: change(m.state_dict_metadata["model.w"])), words)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "__0_0.distcp\0"])
def test_tensors_lie_in_the_folder(folder: Path, path: str) -> None:
    def elsewhere(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    refused(folder, rewritten(folder, elsewhere), "outside of the folder|names no file")


def test_a_tensors_file_that_would_call_something_calls_nothing(
    folder: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    content = io.BytesIO()
    torch.save(Calls(os.system, f"touch {mark}"), content)
    for path in folder.glob("*.distcp"):
        path.write_bytes(content.getvalue())

    def all_of_it(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(content.getvalue())

    refused(folder, rewritten(folder, all_of_it), "cannot be read")
    assert not mark.exists()


def test_a_manifest_names_no_files_outside_of_its_folder(tmp_path: Path) -> None:
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="")
    path = Checkpointer(tmp_path).save(1, {"model.w": torch.ones(2)}, extra)
    manifest = read_manifest(path)
    groups = (msgspec.structs.replace(manifest.groups[0], table="/../../x"),)
    for changed in (
        msgspec.structs.replace(manifest, session="/../../../etc/x"),
        msgspec.structs.replace(manifest, groups=groups),
    ):
        (path / MANIFEST_FILE).write_bytes(encode(changed))
        with pytest.raises(BadCheckpointError, match="outside of its folder"):
            read_manifest(path)


@pytest.mark.parametrize("file", ["../other.safetensors", "/tmp/x.safetensors", 5])
def test_a_model_folder_names_no_files_outside_of_it(tmp_path: Path, file: object) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "modeling_llama.py").write_text(f"open({str(mark)!r}, 'w')\n")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_llama.Evil"},
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(Calls(os.system, f"touch {mark}"), tmp_path / "pytorch_model.bin")
    index = {"weight_map": {"model.embed_tokens.weight": file}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(HfError, match=r"outside of the folder|names no file"):
        list(load_hf(tmp_path))
    assert not mark.exists()


def test_an_archive_of_text_writes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in ("../../evil.txt", "/tmp/evil-of-a-stranger.txt", "a.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
        link = tarfile.TarInfo("b.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    inside = tmp_path / "deep" / "deeper"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    content.seek(0)
    found = [piece.content for piece in tar_pieces(content, 0, "text", lambda: 0)]
    assert found == ["text"] * 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not Path("/tmp/evil-of-a-stranger.txt").exists()


WATCHED = """
import sys
STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen"}
found = []
def hear(event, arguments):
    if event in STARTS or event == "pickle.find_class":
        found.append((event, str(arguments)))
sys.addaudithook(hear)
from phalanx.cli import main
try:
    main()
except SystemExit as end:
    print(end.code)
sys.exit(str(found) if found else 0)
"""
JOB = """
name = "$(touch {mark})"
[model]
preset = "tiny"
[data]
path = "{corpus}"
sequence = 64
[train]
steps = 4
global_batch = 8
device = "cpu"
"""


def test_looking_at_what_a_stranger_sent_starts_nothing(folder: Path, tmp_path: Path) -> None:
    mark, corpus, job = tmp_path / "mark", tmp_path / "corpus", tmp_path / "job.toml"
    corpus.mkdir()
    evil = pickle.dumps(Calls(os.system, f"touch {mark}"))
    for name in ("manifest.json", "tokenizer.json", "shard-0.npy", "train.bin", "train.idx"):
        (corpus / name).write_bytes(evil)
    job.write_text(JOB.format(mark=mark, corpus=corpus))
    (folder / DCP_FILE).write_bytes(evil)
    commands = [
        ["config", "check", str(job)],
        ["plan", "--model", str(job), "--gpu", "h100", "--gpus", "8", "--tokens", "1B"],
        ["data", "inspect", str(job)],
        ["data", "verify", str(corpus)],
        ["ckpt", "verify", str(folder)],
        ["ckpt", "import", str(folder), str(tmp_path / "out")],
    ]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, *command], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert not mark.exists()
