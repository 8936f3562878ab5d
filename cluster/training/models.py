"""The models of a training run: the target as a teacher, and the drafter, new or from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from dendro.errors import BadRequest
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from tree_layers.checkpoint import Facts, read_facts
from tree_layers.errors import CheckpointError
from tree_layers.gguf_weights import gguf_settings
from tree_layers.weights import read_checkpoint

from cluster.checkpoints import check_library_has, check_weights, target_facts
from cluster.config import DrafterConfig, TargetConfig
from cluster.hub import fetched_model
from cluster.model_paths import resolved_path
from cluster.pairing import fit_of
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training.transplant import Transplant, transplant
from drafter_service.models.mamba import time_step_limit
from drafter_service.training.sizes import STUDENT_KINDS, StudentKind, StudentSize, new_model, student_config
from drafter_service.training.students import StudentForward
from drafter_service.training.vocabulary import guess

CONFIGS: dict[StudentKind, type[PreTrainedConfig]] = {
    "mamba": MambaConfig,
    "mamba2": Mamba2Config,
    "llama": LlamaConfig,
}
EMBEDDINGS: dict[StudentKind, str] = {
    "mamba": "backbone.embeddings.weight",
    "mamba2": "backbone.embeddings.weight",
    "llama": "model.embed_tokens.weight",
}
HEAD = "lm_head.weight"
ROOM = 0.8
"""The share of the free memory that a target's weights may take."""


def checked_target(name: str, target: TargetConfig) -> Facts:
    """The facts of a target that transformers can load. Raises BadRequest, naming the field."""
    where = f"targets.{name}.checkpoint"
    check_library_has(target.checkpoint, where)
    facts = target_facts(name, target)
    check_weights(target, where)
    if facts.layout != "transformers":
        raise BadRequest(where, f"{target.checkpoint} has the layout of {facts.layout}, which transformers cannot load")
    return facts


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def load_teacher(name: str, target: TargetConfig, facts: Facts, device: torch.device) -> PreTrainedModel:
    """The target: in float32 on a CPU with room for it, else in its configured dtype. Raises BadRequest, naming the
    field, for one that does not fit in memory."""
    where = f"targets.{name}.checkpoint"
    dtype: torch.dtype = getattr(torch, target.dtype)
    numbers, free = facts.numbers or 0, free_bytes(device)
    if device.type == "cpu" and numbers * torch.float32.itemsize <= ROOM * free:
        dtype = torch.float32
    if numbers * dtype.itemsize > ROOM * free:
        needed = numbers * dtype.itemsize / ROOM
        raise BadRequest(
            where,
            f"its {numbers / 1e9:.2f} billion parameters need {needed / 1e9:.1f} GB of memory in {target.dtype}; "
            f"{free / 1e9:.1f} GB are free on {device}",
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            target.checkpoint,
            dtype=dtype,
            trust_remote_code=False,
            **{"local_files_only": True, **gguf_settings(target.checkpoint)},
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadRequest(where, f"transformers cannot load it: {str(error).splitlines()[0]}") from error
    assert isinstance(model, PreTrainedModel)
    return nn.Module.to(model.eval().requires_grad_(False), device)


def principal_rows(rows: Tensor, width: int) -> Tensor:
    """The rows in the coordinates of their largest principal components, in float32, turned by a fixed random rotation
    so that every coordinate has its share of the large components.

    rows [tokens, hidden]; result [tokens, min(width, hidden)]
    """
    rows = rows.float()
    centred = rows - rows.mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    count = components.shape[1]
    rotation, _ = torch.linalg.qr(torch.randn(count, count, generator=torch.Generator().manual_seed(0)))
    turned: Tensor = centred @ components @ rotation.to(rows.device)
    return turned


def new_student(
    kind: StudentKind,
    size: StudentSize,
    target: Facts,
    rows: Tensor,
    guessed: np.ndarray | None,
    seed: int,
    device: torch.device,
) -> PreTrainedModel:
    """A drafter with random layers and the target's tokens, whose rows come of the target's: the drafter need not learn
    anew which tokens resemble each other.

    rows [tokens, coordinates]: `principal_rows` of the target's head   guessed [N]: ids, ascending; None: all
    """
    tokens = _tokens(target)
    if guessed is None:
        model = new_model(student_config(kind, size, tokens), seed, device)
        set_rows(model, rows)
        return model
    end = int(np.searchsorted(guessed, min(target.end_ids))) if target.end_ids else None
    ends = {name: end for name in tokens if name != "vocab_size"}
    model = new_model(student_config(kind, size, {"vocab_size": len(guessed), **ends}), seed, device)
    scaled = rows * (model.get_input_embeddings().weight.std() / rows.std().clamp(min=1e-12)).item()
    set_rows(model, rows[torch.from_numpy(guessed)])
    return guess(model, guessed, F.pad(scaled, (0, size.width - rows.shape[1])))


@torch.no_grad()
def set_rows(model: PreTrainedModel, rows: Tensor) -> None:
    """Make these the first coordinates of a new model's rows, which its embedding and its head share, with the spread
    of the random ones that they replace. rows [tokens, coordinates]; further tokens keep their random rows."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    rows = rows.to(weight.device)
    tokens, coordinates = min(len(rows), len(weight)), rows.shape[1]
    weight[:tokens, :coordinates] = (rows[:tokens] * (weight.std() / rows.std().clamp(min=1e-12))).to(weight)


def _tokens(target: Facts) -> dict[str, Any]:
    end = min(target.end_ids, default=None)
    return {"vocab_size": target.vocabulary, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint to continue from."""

    folder: Path
    tokenizer: Path  # the folder of its tokenizer
    facts: Facts

    def transplant(self, target: Facts, target_tokenizer: Path) -> Transplant | None:
        """Map from its rows to those of the target's tokens; None if it has the target's tokenizer. Raises
        BadRequest, naming the option."""
        if fit_of(target, self.facts).fits:
            return None
        ours, theirs = (
            CheckpointTokenizer(folder, facts.tokenizer)
            for folder, facts in ((target_tokenizer, target), (self.tokenizer, self.facts))
        )
        return transplant(target, self.facts, ours, theirs)


def start_from(given: Path, tokenizer: Path | None, target: Facts) -> Start:
    """The checkpoint in a folder, or of a name on the hub, which is fetched; `tokenizer` is another folder or name that
    has its tokenizer.

    Raises BadRequest, naming the option, for one that cannot be trained further.
    """
    named = None if tokenizer is None else resolved_path("--from-tokenizer", tokenizer, Path.cwd())
    model = DrafterConfig(checkpoint=resolved_path("--from", given, Path.cwd()), tokenizer=named)
    fetched = fetched_model("--from", model)
    folder = fetched.checkpoint
    try:
        facts = read_facts(folder, fetched.tokenizer)
    except CheckpointError as error:
        raise BadRequest("--from", str(error)) from error
    if facts.model_type not in STUDENT_KINDS:
        kinds = ", ".join(STUDENT_KINDS)
        raise BadRequest("--from", f"{folder} is a {facts.model_type}; {kinds} can be trained")
    if facts.draft is not None:
        raise BadRequest("--from", f"{folder} {facts.draft}; a drafter that guesses all of them can be continued")
    if facts.quantised:
        raise BadRequest("--from", f"{folder}: its weights are quantised ({facts.quantised})")
    if facts.tokens is None and not fit_of(target, facts).fits:
        raise BadRequest(
            "--from", f"{folder} has no tokenizer: name a folder that has it, or a name on the hub, by --from-tokenizer"
        )
    if unfit := _not_finite(facts):
        raise BadRequest("--from", f"{folder}: {unfit} has values that are not finite; name another checkpoint")
    return Start(folder, fetched.tokenizer_folder, facts)


def _not_finite(facts: Facts) -> str:
    """The name of a weight of a checkpoint that has an infinity or a NaN; empty if there is none. Raises BadRequest for
    files that cannot be read."""
    try:
        tensors = read_checkpoint(facts).tensors
    except CheckpointError as error:
        raise BadRequest("--from", str(error)) from error
    floats = ((name, each) for name, each in tensors.items() if each.is_floating_point())
    return next((name for name, each in floats if not bool(each.isfinite().all())), "")


def student_from(
    start: Start, target: Facts, made: Transplant | None, seed: int, device: torch.device
) -> PreTrainedModel:
    """A checkpoint's model with the target's tokens: the rows of its vocabulary by the transplant. Without one, rows
    past the target's tokens are left out, and rows that it lacks are random.

    Raises BadRequest, naming the option, for weights that do not fit its configuration.
    """
    facts = start.facts
    try:
        checkpoint = read_checkpoint(facts)
        kind = next(each for each in STUDENT_KINDS if each == facts.model_type)
        limit = {"time_step_limit": time_step_limit(facts.config)} if kind == "mamba2" else {}
        config = CONFIGS[kind].from_dict({**facts.config, **limit, **_tokens(target)})
        ends = EMBEDDINGS[kind], HEAD, bool(config.tie_word_embeddings), facts.config["vocab_size"], config.hidden_size
        embedding, head = checkpoint.embedding_and_head(*ends)
        config.tie_word_embeddings = config.tie_word_embeddings and torch.equal(embedding, head)
        by_token = {EMBEDDINGS[kind]: embedding} | ({} if config.tie_word_embeddings else {HEAD: head})
        model = new_model(config, seed, device)
        StudentForward(model)  # raises ValueError for what has no training forward
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                if (source := by_token.get(name)) is not None:
                    _copy_rows(weight, source if made is None else made.rows(source.float().cpu()))
                elif name != HEAD:
                    weight.copy_(checkpoint.tensor(name, *weight.shape))
    except (CheckpointError, ValueError) as error:
        raise BadRequest("--from", str(error)) from error
    return model


def _copy_rows(weight: Tensor, source: Tensor) -> None:
    rows = min(len(weight), len(source))
    weight[:rows] = source[:rows]
