"""The rules of the .proto files, by buf: its STANDARD lint, and no change that breaks clients of the public API."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dendro.v1 import generation_pb2 as pb
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
PUBLISHED = Path("protos", "published.binpb")
BUF = shutil.which("buf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
with_buf = pytest.mark.skipif(BUF is None, reason="needs buf: the package buf-bin, of the extra dev")


@pytest.fixture
def protos(tmp_path) -> Path:
    """A copy of what buf reads."""
    for path in ("buf.yaml", PUBLISHED, *(each.relative_to(ROOT) for each in (ROOT / "protos").rglob("*.proto"))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def buf(folder: Path, *arguments: str) -> str:
    """What buf finds; empty: nothing. Raises for a failure of buf itself."""
    home = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    done = subprocess.run([str(BUF), *arguments], cwd=folder, env=home, capture_output=True, text=True)
    assert done.returncode in (0, 100) and (done.returncode == 100) == bool(done.stdout), done.stderr
    return done.stdout


def broken(folder: Path) -> str:
    return buf(folder, "breaking", "--against", str(PUBLISHED))


def change(folder: Path, old: str, new: str) -> None:
    file = folder / "protos/dendro/v1/generation.proto"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@with_buf
def test_the_files_keep_the_standard_rules_and_a_wrong_name_is_found(protos):
    assert buf(protos, "lint") == ""
    change(protos, "string request_id = 1;", "string requestId = 1;")
    assert 'Field name "requestId" should be lower_snake_case' in buf(protos, "lint")


@with_buf
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("uint32 aborted = 1;", "", 'Previously present field "1" with name "aborted"'),
        ("uint32 aborted = 1;", "uint32 ended = 1;", "changed name"),
        ("uint32 aborted = 1;", "string aborted = 1;", "changed type"),
        ("rpc Abort(AbortRequest) returns (AbortResponse);", "", 'Previously present RPC "Abort"'),
    ],
    ids=["removed", "renamed", "retyped", "method"],
)
def test_a_change_that_breaks_clients_is_found(protos, old, new, words):
    assert broken(protos) == ""
    change(protos, old, new)
    assert words in broken(protos)


@with_buf
def test_a_new_field_breaks_nothing(protos):
    change(protos, "uint32 aborted = 1;", "uint32 aborted = 1;\n  // more is new.\n  uint32 more = 2;")
    assert broken(protos) == ""


def test_the_published_api_has_all_of_todays_so_that_what_is_removed_later_is_found():
    """Where this fails after an addition: buf build --exclude-source-info --path protos/dendro/v1 -o PUBLISHED."""
    (published,) = FileDescriptorSet.FromString((ROOT / PUBLISHED).read_bytes()).file
    today = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(today)
    for file in (published, today):
        for message in file.message_type:
            _without_names_in_json(message)
    for part in ("message_type", "enum_type", "service"):
        assert list(getattr(published, part)) == list(getattr(today, part))


def _without_names_in_json(message: DescriptorProto) -> None:
    """The names in JSON follow from the fields' names, and not every compiler writes them."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _without_names_in_json(nested)
