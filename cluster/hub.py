"""Checkpoints by their names on a model hub, through `huggingface_hub`: its cache, its token, its variables.

A name's revision is resolved to a commit once, where a cluster is started, and sent with the configuration; every node
then fetches that commit into its own cache. Only the files that a model needs are fetched, and no code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dendro.errors import BadRequest, PeerLost
from tree_layers.checkpoint import CONFIG, GENERATION, MAMBA_CONFIG, WEIGHT_FILES, shards_of, weight_files
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY
from tree_layers.errors import CheckpointError
from tree_layers.tokens import TOKENIZER_FILES

from cluster.config import Config, ModelConfig
from cluster.gguf_files import folder_of
from cluster.model_paths import hub_file, hub_name, is_gguf

READ_FOR_TOKENIZER = (*TOKENIZER_FILES, "chat_template.jinja")
"""Files of a tokenizer that we and transformers read; fetched where they exist."""
SMALL_FILES = (CONFIG, GENERATION, MAMBA_CONFIG, DRAFT_VOCABULARY, *READ_FOR_TOKENIZER)
"""Files that describe a model, its tokens and its tokenizer; fetched where they exist."""
MOST_NAMED = 8
"""Files of a repository that an error names."""
COMMIT = re.compile(r"[0-9a-f]{40}")

AnyModel = TypeVar("AnyModel", bound=ModelConfig)


def pinned(config: Config) -> Config:
    """The configuration with the revision of every name on the hub resolved to a commit. Folders, and revisions that
    are commits, are unchanged. Raises BadRequest, naming the field, or PeerLost."""
    return config.with_models(_pin)


def fetched(config: Config, weights: bool = True) -> Config:
    """The configuration with this machine's folders instead of names on the hub, which are fetched into the cache.

    weights: whether to fetch these too; a router needs only the small files. Raises as `pinned` does.
    """
    return config.with_models(lambda where, model: fetched_model(where, model, weights))


def fetched_model(where: str, model: AnyModel, weights: bool = True) -> AnyModel:
    """One entry, whose path in the configuration is `where`, with this machine's folders instead of names on the hub
    and GGUF files. A GGUF file is fetched without `weights`, too: its header is the configuration. Raises as `pinned`
    does."""
    folders: dict[str, Path | str] = {}
    if model.checkpoint_name:
        field = f"{where}.checkpoint"
        with _explained(field, model.checkpoint, model.revision):
            if file := hub_file(model.checkpoint):
                folders["checkpoint"] = _fetch_file(field, model.checkpoint_name, file, model.revision)
            else:
                folders["checkpoint"] = _fetch(field, model.checkpoint_name, model.revision, weights)
        folders["revision"] = ""
    if model.tokenizer is not None and model.tokenizer_name:
        field = f"{where}.tokenizer"
        with _explained(field, model.tokenizer, model.tokenizer_revision):
            if file := hub_file(model.tokenizer):
                folders["tokenizer"] = _fetch_file(field, model.tokenizer_name, file, model.tokenizer_revision)
            else:
                folders["tokenizer"] = _snapshot(model.tokenizer_name, model.tokenizer_revision, READ_FOR_TOKENIZER)
        folders["tokenizer_revision"] = ""
    for field, path in (("checkpoint", model.checkpoint), ("tokenizer", model.tokenizer)):
        if path is not None and is_gguf(path):
            try:
                folders[field] = folder_of(Path(folders.get(field, path)))
            except CheckpointError as error:
                raise BadRequest(f"{where}.{field}", str(error)) from error
    return model.model_copy(update=folders)


def _pin(where: str, model: AnyModel) -> AnyModel:
    commits = {}
    for field, path, name, key, revision in (
        ("checkpoint", model.checkpoint, model.checkpoint_name, "revision", model.revision),
        ("tokenizer", model.tokenizer, model.tokenizer_name, "tokenizer_revision", model.tokenizer_revision),
    ):
        if path is not None and name and not COMMIT.fullmatch(revision):
            with _explained(f"{where}.{field}", path, revision):
                # The folder of a snapshot is named by its commit, with and without a network.
                commits[key] = _snapshot(name, revision, [hub_file(path) or CONFIG], bars=True).name
    return model.model_copy(update=commits)


def _snapshot(name: str, revision: str, files: Sequence[str], bars: bool = False) -> Path:
    """The cache's folder of a commit, with those of `files` that the hub has.

    bars: whether to show progress, where standard error is a terminal.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import enable_progress_bars, tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]  # tqdm's

    shown = tqdm if bars and sys.stderr.isatty() else Silent
    if shown is tqdm and not HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()  # loading a model disables them, with transformers' own
    return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files), tqdm_class=shown))


def _fetch(field: str, name: str, revision: str, weights: bool) -> Path:
    folder = _snapshot(name, revision, SMALL_FILES)
    if not weights or _has_weights(folder):
        return folder
    from huggingface_hub import HfApi

    existing = set(HfApi().list_repo_files(name, revision=revision or None))
    for single, index in WEIGHT_FILES:
        if single in existing:
            return _snapshot(name, revision, [single], bars=True)
        if index in existing:
            return _snapshot(name, revision, shards_of(_snapshot(name, revision, [index]), index), bars=True)
    if named := sorted(file for file in existing if is_gguf(Path(file))):
        listed = ", ".join(f"{name}/{file}" for file in named[:MOST_NAMED])
        raise BadRequest(field, f"{name} has GGUF files: name one of its {len(named)}, such as {listed}")
    endings = sorted({Path(file).suffix for file in existing} & {".onnx", ".pth", ".h5", ".msgpack"})
    others = f"; what it has ends in {', '.join(endings)}" if endings else ""
    raise BadRequest(field, f"{name} has no weights in model.safetensors or pytorch_model.bin{others}")


def _fetch_file(field: str, name: str, file: str, revision: str) -> Path:
    """One file of a repository, which has it or is refused with its other GGUF files."""
    found = _snapshot(name, revision, [file], bars=True) / file
    if found.is_file():
        return found
    from huggingface_hub import HfApi

    others = sorted(each for each in HfApi().list_repo_files(name, revision=revision or None) if is_gguf(Path(each)))
    has = f"; it has {', '.join(others[:MOST_NAMED])}" if others else "; it has no GGUF file"
    raise BadRequest(field, f"{name} has no file {file} at {revision or 'main'}{has}")


def _has_weights(folder: Path) -> bool:
    """True if a folder of the cache has all weights of a model."""
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False


@contextmanager
def _explained(field: str, path: Path, revision: str) -> Iterator[None]:
    """Map errors of the hub to ours, with what the operator can do. path: a name on the hub, with or without a file."""
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, hub_name(path)
    here = f"there is no {'file' if hub_file(path) else 'folder'} {path} here, and as a name on the hub {hub}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise BadRequest(
            field, f"{name} is gated: accept its terms at {hub}/{name}, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        key = f"{field.rpartition('.')[0]}.{'revision' if field.endswith('checkpoint') else 'tokenizer_revision'}"
        raise BadRequest(key, f"{name} has no revision {revision or 'main'!r} on the hub {hub}") from error
    except errors.RepositoryNotFoundError as error:
        raise BadRequest(
            field, f"{here} it is not there, or is private: then HF_TOKEN must be set to a token that may read it"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.is_offline_mode()
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub does not answer: {_first_line(error)}"
        raise BadRequest(
            field,
            f"{here} it is not complete in the cache {constants.HF_HUB_CACHE}, and {why}. Fetch it where there is a "
            "network, or name a folder",
        ) from error
    except errors.HFValidationError as error:
        raise BadRequest(field, f"{here} it is not a valid one: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        raise BadRequest(field, f"the hub {hub} refuses {name}: {_first_line(error)}") from error
    except errors.HTTPError as error:  # raised by the HTTP library of this version of huggingface_hub
        raise PeerLost(f"{field}: the hub {hub} failed while {name} was fetched: {_first_line(error)}") from error
    except (OSError, ValueError, CheckpointError) as error:
        raise BadRequest(field, f"{name} cannot be fetched: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
