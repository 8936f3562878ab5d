"""Drafters that are transformers' own models with our attention and mixers: hybrids, and Transformers without a form of
their own here.

The library's model keeps its embeddings, norms, projections, MLPs, experts and multipliers. Attention reads the keys
and values of `KeyMemory`, mixers read the states of `InputSlots` (Mamba-2) or `MixedStates` (Mamba-1), both through the
`LibraryForward` that is set before each call.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from dendro.shapes import MAX_ROWS
from dendro.state import Arrays
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from tree_layers.checkpoint import decoded, rope_types
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import check_activation, group_norms, is_mamba1, is_mixer
from tree_layers.weights import Checkpoint

from drafter_service.draft_ids import DraftIds
from drafter_service.models.backbone import FOREIGN
from drafter_service.models.inputs import InputSlots
from drafter_service.models.llama import LENGTH_DEPENDENT, KeptKeys, KeyMemory, Rows, attend
from drafter_service.models.mamba import NO_END
from drafter_service.models.memory import DrafterMemory
from drafter_service.models.mixers import LibraryMamba1, LibraryMamba2
from drafter_service.models.states import MixedStates
from drafter_service.plan import Chains, Level, TextFold

ATTENTION = "dendro_drafter"
"""Name of our attention in transformers. No mask function is registered under it, so models pass no mask."""

Mixer = LibraryMamba1 | LibraryMamba2


class KeyShape(NamedTuple):
    """Shape of a token's keys in an attention layer; its values have the same."""

    kv_heads: int  # K
    width: int  # D


@dataclass(slots=True)
class LibraryForward:
    """The current forward of a model, read by the model's attention and mixers."""

    parts: Sequence[Rows] = ()
    kept: KeptKeys | None = None  # None: a probe, which records the shape of each attention layer
    mix: Callable[[int, Any, Tensor], Tensor] | None = None  # runs a mixer; None: a probe
    form: tuple[int, ...] = ()  # shape of the rows: (rows, T) of chains, (rows,) of a level
    probed: list[KeyShape] = field(default_factory=list)  # key shape of each attention layer


class AttentionSeat:
    """State of an attention layer: the layer's number among the attention layers, and the current forward."""

    __slots__ = ("forward", "number")

    def __init__(self, forward: LibraryForward) -> None:
        self.forward = forward
        self.number = -1


def attend_memory(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend to texts and nodes in memory. Called by transformers for each attention layer of a forward.

    query [1, H, rows, D]   key, value [1, K, rows, D]   returns [1, rows, H, D]
    Raises CheckpointError in a probe for a layer of a kind that is not supported.
    """
    seat: AttentionSeat = module.dendro_seat  # type: ignore[assignment]  # `LibraryDrafter.of` sets it
    forward = seat.forward
    keys = torch.stack((key[0], value[0])).permute(2, 0, 1, 3) if key.shape == value.shape else None
    if forward.kept is None:
        unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if others.get(name) is not None]
        if unsupported or attention_mask is not None or keys is None or seat.number >= 0:
            what = f"with {', '.join(unsupported)}" if unsupported else "of this kind"
            raise CheckpointError(f"{type(module).__name__}: attention {what} is not supported in a drafter")
        seat.number = len(forward.probed)
        forward.probed.append(KeyShape(key.shape[1], key.shape[3]))
        return query.transpose(1, 2), None
    assert keys is not None
    forward.kept.take(seat.number, keys)
    queries = query[0].transpose(0, 1).contiguous()
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    attended = [
        attend(
            queries[part.rows], part.text[seat.number], forward.kept.nodes(seat.number, part, keys), part.mask, scale
        )
        for part in forward.parts
    ]
    return torch.cat(attended)[None], None


AttentionInterface.register(ATTENTION, attend_memory)


@dataclass(frozen=True, slots=True, eq=False)
class LibraryDrafter:
    """A language model of transformers with attention, or with attention and mixers."""

    library: PreTrainedModel  # the model without its head
    forward: LibraryForward
    mixers: tuple[Mixer, ...]  # mixers of one kind and of equal shapes
    head: Tensor  # [V, d]
    head_bias: Tensor | None
    logit_scale: float
    key_layers: int
    kv_heads: int
    width: int
    max_length: int
    form: str = "eager"
    draft_ids: DraftIds | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LibraryDrafter:
        """Make a checkpoint's drafter. Raises CheckpointError for tensors and options that are missing, unsupported or
        of the wrong shape."""
        if checkpoint.draft is not None:
            raise CheckpointError(
                f"{checkpoint.path}: {DRAFT_VOCABULARY} is not supported for a drafter of type "
                f"{checkpoint.facts.model_type!r}"
            )
        config = _library_config(checkpoint)
        model = _library_model(checkpoint, config, dtype).to(device).eval().requires_grad_(False)
        group_norms(model)
        forward = LibraryForward()
        mixers = _seat(checkpoint, model, forward)
        shape = _probe(checkpoint, model, forward)
        head: Any = model.get_output_embeddings()
        vocabulary = checkpoint.facts.vocabulary
        return cls(
            library=model.base_model,
            forward=forward,
            mixers=mixers,
            head=head.weight[:vocabulary],
            head_bias=None if head.bias is None else head.bias[:vocabulary],
            logit_scale=getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0),
            key_layers=len(forward.probed),
            kv_heads=shape.kv_heads,
            width=shape.width,
            max_length=checkpoint.facts.positions or NO_END,
        )

    @property
    def vocabulary(self) -> int:
        return len(self.head)

    @property
    def positions(self) -> int:
        # A tree's nodes may lie past the longest text.
        return self.max_length + MAX_ROWS

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    def memory(self, texts: int, nodes: int) -> DrafterMemory:
        return LibraryMemory(self, texts, nodes) if self.mixers else KeyMemory(self, texts, nodes)

    def through(self, tokens: Tensor, positions: Tensor, parts: Sequence[Rows], kept: KeptKeys) -> Tensor:
        """Hidden rows [rows, d] after the last norm, of tokens [rows] at these positions. Stores their keys and values
        in `kept`, and runs the mixers by `forward.mix`."""
        self.forward.parts, self.forward.kept = parts, kept
        tokens = torch.where(tokens < self._embedding.num_embeddings, tokens, FOREIGN)
        hidden: Tensor = self.library(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] float32 of hidden [rows, d]."""
        return F.linear(hidden, self.head, self.head_bias).float() * self.logit_scale

    @property
    def hidden_size(self) -> int:
        return self.head.shape[1]

    def normed(self, hidden: Tensor) -> Tensor:
        """Input of the head [rows, d] float32: the hidden rows, which the library's model has already normed."""
        return hidden.float()

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding [..., d] for any ids >= 0 [...]. Target ids past the embedding are fed as FOREIGN."""
        rows: Tensor = self._embedding(torch.where(tokens < self._embedding.num_embeddings, tokens, FOREIGN))
        return rows

    @property
    def _embedding(self) -> Any:
        return self.library.get_input_embeddings()


class LibraryMemory:
    """Memory of a `LibraryDrafter`: text slots with keys, values and states; node slots with keys, values and inputs
    (Mamba-1: states)."""

    def __init__(self, model: LibraryDrafter, texts: int, nodes: int) -> None:
        self._forward = model.forward
        self._keys = KeyMemory(model, texts, nodes)
        slots = texts, nodes, model.dtype, model.device
        two = [mixer for mixer in model.mixers if isinstance(mixer, LibraryMamba2)]
        one = [mixer for mixer in model.mixers if isinstance(mixer, LibraryMamba1)]
        self._states: InputSlots | MixedStates = InputSlots(two, *slots) if two else MixedStates(one, *slots)

    @property
    def layout(self) -> str:
        return f"{self._keys.layout}+{self._states.layout}"

    def text_bytes(self, longest: int) -> int:
        return self._keys.text_bytes(longest) + self._states.text_bytes(longest)

    @property
    def node_bytes(self) -> int:
        return self._keys.node_bytes + self._states.node_bytes

    def save(self, text: int, tokens: int) -> Arrays:
        return {**self._keys.save(text, tokens), **self._states.save(text, tokens)}

    def check(self, arrays: Arrays, tokens: int) -> None:
        keys = {name: array for name, array in arrays.items() if name == "keys"}
        self._keys.check(keys, tokens)
        self._states.check({name: array for name, array in arrays.items() if name not in keys}, tokens)

    def load(self, text: int, arrays: Arrays) -> None:
        self._keys.load(text, arrays)
        self._states.load(text, arrays)

    def chain(self, rows: Chains) -> Tensor:
        self._forward.mix, self._forward.form = self._states.of_chain(rows), rows.tokens.shape
        return self._keys.chain(rows)

    def level(self, rows: Level) -> Tensor:
        self._forward.mix, self._forward.form = self._states.of_level(rows), rows.tokens.shape
        return self._keys.level(rows)

    def fold(self, folds: Sequence[TextFold]) -> None:
        self._keys.fold(folds)
        self._states.fold(folds)


def _library_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Configuration as transformers reads it, with transformers' defaults for missing keys. Raises CheckpointError."""
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**decoded(checkpoint.config))
    except Exception as error:  # transformers validates fields with exceptions of several types
        raise CheckpointError(f"{checkpoint.path}: config.json: {error}") from error
    if refused := sorted({*rope_types(config.to_dict())} & {*LENGTH_DEPENDENT}):
        raise CheckpointError(f"{checkpoint.path}: rotary embeddings of type {refused[0]} depend on the text's length")
    return config


def _library_model(checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make transformers' model. Raises CheckpointError for a tensor that is missing or has another shape."""
    logging.disable_progress_bar()  # a replica's log is no terminal
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(checkpoint.tensors),
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name below
        )
    except Exception as error:  # a family's constructor may raise anything
        raise CheckpointError(f"{checkpoint.path}: its model cannot be made: {error}") from error
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.path}: there is no tensor {missing[0]}")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise CheckpointError(f"{checkpoint.path}: {name} has shape {list(found)}, not {list(wanted)}")
    loaded: PreTrainedModel = model
    return loaded


def _seat(checkpoint: Checkpoint, model: PreTrainedModel, forward: LibraryForward) -> tuple[Mixer, ...]:
    """Let the model's attention and mixers read `forward`. Returns the mixers in order."""
    mixers: list[Mixer] = []
    for module in model.modules():
        module.dendro_seat = AttentionSeat(forward)
        if is_mixer(module):
            check_activation(checkpoint.path, module)
            mixers.append(LibraryMamba1.of(module) if is_mamba1(module) else LibraryMamba2.of(module))
            _replace_forward(module, forward, len(mixers) - 1, mixers[-1])
    if len(shapes := {mixer.shape for mixer in mixers}) > 1:
        raise CheckpointError(f"{checkpoint.path}: mixers of several shapes are not supported in a drafter: {shapes}")
    return tuple(mixers)


def _replace_forward(module: nn.Module, forward: LibraryForward, number: int, mixer: Mixer) -> None:
    def run(self: nn.Module, hidden_states: Tensor, *_: Any, **ignored: Any) -> Tensor:
        """Run the mixer. hidden_states and the result are [1, rows, d]"""
        if forward.mix is None:  # a probe forward has no mixer to run
            return torch.zeros_like(hidden_states)
        u = hidden_states[0].unflatten(0, forward.form)
        return forward.mix(number, mixer, u).reshape(hidden_states.shape)

    module.forward = types.MethodType(run, module)


@torch.inference_mode()
def _probe(checkpoint: Checkpoint, model: PreTrainedModel, forward: LibraryForward) -> KeyShape:
    """Number the attention layers, in order, by a forward of one token. Returns their common key shape. Raises
    CheckpointError."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model.base_model(input_ids=token, position_ids=token, use_cache=False)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    except Exception as error:  # a family's forward may raise anything
        raise CheckpointError(f"{checkpoint.path}: its model cannot be run: {error}") from error
    shapes = set(forward.probed)
    if len(shapes) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: layers that attend must be at least one and have equal shapes in a drafter; found "
            f"{sorted(shapes)}"
        )
    return shapes.pop()
