"""Loads a decoder-only checkpoint as a target: transformers' model, with our attention and mixers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from dendro.errors import BadRequest
from torch import Tensor, nn
from torch.distributed import DistError
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging
from tree_kernels.elementwise import threads_of
from tree_kernels.matmul import PackedWeight
from tree_kernels.products import library_digest
from tree_kernels.tree_attention import Layout, compiled
from tree_layers.awq_settings import AWQ
from tree_layers.checkpoint import (
    MAMBA_CONFIG,
    Facts,
    read_config,
    read_facts,
    refuse_draft_vocabulary,
    weight_files,
    weights_fingerprint,
)
from tree_layers.errors import CheckpointError
from tree_layers.launching import launching_on
from tree_layers.library_mixers import group_norms
from tree_layers.linear import RowForms
from tree_layers.quantised_packing import QuantisedPacking, quantised_packing
from tree_layers.row_weights import make_rows_independent
from tree_layers.rows_report import RowsReport
from tree_layers.tree_mixers import MixerLayout

from verifier_service.collectives import Collectives
from verifier_service.models.activations import make_activations_safe
from verifier_service.models.attention_layers import CompiledAttention, use_attention_layers
from verifier_service.models.comparing import check_logits, short_text
from verifier_service.models.decoder_layers import CompiledStack, use_decoder_layers
from verifier_service.models.device_blocks import use_device_blocks
from verifier_service.models.device_layers import use_device_layers
from verifier_service.models.device_norms import use_norm_kernel
from verifier_service.models.device_pages import attention_on_device, device_layouts
from verifier_service.models.direct import DirectForward, direct_forward
from verifier_service.models.experts import seat_experts
from verifier_service.models.families import (
    FamilyError,
    Property,
    check_config,
    check_layer_types,
    probe_layers,
    why_not_loaded,
    why_not_read,
)
from verifier_service.models.gpu_products import accelerator_digest, settle_products
from verifier_service.models.head import HEAD_ROWS, Head, Product
from verifier_service.models.heads import plan_shards
from verifier_service.models.joined_products import join_weights
from verifier_service.models.last_layer import LastLayer, are_few, use_last_layer
from verifier_service.models.library_logits import library_logits
from verifier_service.models.mamba_in_llama import MambaInLlamaConfig, library_config
from verifier_service.models.mixers import MIXER_FAMILIES, run_from_tables, seat_mixers
from verifier_service.models.reading import check_scales, load_library_model
from verifier_service.models.row_functions import use_row_functions
from verifier_service.models.seats import ATTENTION, ForwardContext, Seat
from verifier_service.models.sharded import check_divisible, take_off_wrappers

HEAD_OUTPUTS = 8
"""Multiple of outputs to which the head's product is padded on a GPU, whose library is fast for such sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedTarget:
    """A loaded target and its properties."""

    model: PreTrainedModel
    run: ForwardContext  # rows and pages that the attention reads; set before each forward
    layouts: tuple[Layout, ...]  # one per attention layer, in the order in which they run
    mixers: tuple[MixerLayout, ...]  # one per state-space mixer
    facts: Facts
    max_positions: int  # number of positions that the model has
    window: int | None  # most positions that a row sees, itself among them; None where some layer sees all
    fingerprint: str  # hash of the weights and the configuration
    by_kernels: bool  # True if an accelerator's kernels attend and scan, from fixed arrays: steps can be recorded
    own_arithmetic: bool  # True if this project computes some products, functions or attention, which round otherwise
    linear: RowsReport
    packing: QuantisedPacking | None  # packs weights that may stay quantised; None if no weights may
    attention: str  # name of the form of the target's attention; empty where no layer attends
    head: Head
    last_layer: LastLayer | None  # runs the last layer on wanted rows alone; None: it always runs on all rows
    direct: DirectForward | None  # runs the parts without the library's code around them; None: not possible

    @property
    def arithmetic(self) -> str:
        """What a row's bits depend on beside the model, in words: the forms of the products, and a digest of what the
        libraries compute on this processor or accelerator."""
        forms, device = "+".join(sorted(self.linear.forms)), self.model.device
        own = "-own" if self.own_arithmetic else ""  # our kernels and the library round differently
        if device.type != "cpu":  # sums differ by GPU
            return f"{forms}{own}-{device.type}-{accelerator_digest(device)}"
        # MKL and torch choose instructions by the processor. A forward by parts has only cosines and sines from torch,
        # others also scans, norms or routers.
        return f"{forms}{own}-{library_digest() if self.direct is None else self.direct.rotation_digest}"

    @property
    def quantised(self) -> str:
        """Names of the forms of the weights that stay quantised; empty if no weights do."""
        return "" if self.packing is None else str(self.packing)

    @property
    def vocabulary(self) -> int:
        """Number of the tokenizer's tokens; logits past it are padding."""
        return self.facts.vocabulary

    @property
    def token_bytes(self) -> int:
        """Bytes of attention memory of one token."""
        return sum(layout.token_bytes for layout in self.layouts)

    def recurrent_bytes(self, tokens: int, states: int) -> int:
        """Bytes of all mixers' memory for `tokens` inputs and `states` checkpoints."""
        return sum(tokens * layout.token_bytes + states * layout.state_bytes for layout in self.mixers)

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Run a forward, which reads and fills the run's pages. Returns the logits of wanted rows [k, vocabulary]
        float32.

        tokens, positions [rows] int64   wanted [k]: numbers of rows
        """
        with self._one_thread():
            found = None if self.direct is None else self.direct.logits(tokens, positions, wanted)
            if found is not None:
                return found
            logits: Tensor = self._forward(tokens, positions, wanted).logits[0]
            return logits

    def hidden(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Run a forward like `logits`, without the head. Returns the hidden rows [k, D] that go into the head."""
        with self._one_thread():
            return self.head.take(lambda: self._forward(tokens, positions, wanted))

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] float32 of any of the rows that `hidden` returned [n, D]."""
        with self._one_thread():
            return self.head.logits(hidden)

    def _forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Any:
        with (self._few(tokens, wanted) or self.head).of_rows(wanted):
            return self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)

    def _few(self, tokens: Tensor, wanted: Tensor) -> LastLayer | None:
        """The last layer, if so few rows are wanted that running it on these alone saves time (it then runs by its
        parts, not in one compiled call); else None."""
        return self.last_layer if are_few(len(wanted), len(tokens)) else None

    def _one_thread(self) -> AbstractContextManager[None]:
        """A forward runs in one thread; large products, attention and scans of many rows set more threads themselves.

        Other operations are small, and several threads would split their buffers into parts of any length: functions
        that round the end of a part differently would then give other bits (`tree_kernels.elementwise`).
        """
        return threads_of(1) if self.run.threads > 1 else nullcontext()


def load_target(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    buckets: Sequence[int],
    threads: int = 1,
    group: Collectives | None = None,
    tokenizer: Path | None = None,
) -> LoadedTarget:
    """Load a checkpoint for steps that are padded to the numbers of rows `buckets`. With `group`, load only this
    worker's shard, which also needs torch's own process group. Raises BadRequest with the reason.

    tokenizer: the folder with the tokenizer, where that is not the checkpoint.
    """
    folder = Path(path)
    try:
        with launching_on(device):
            target = _load(folder, tokenizer or folder, dtype, device, buckets, threads, group)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # torch keeps what the checks of products took
            return target
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error


def _load(
    folder: Path,
    tokenizer_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    buckets: Sequence[int],
    threads: int,
    group: Collectives | None,
) -> LoadedTarget:
    if device.type == "cuda":
        settle_products()
    check_config(folder, read_config(folder))
    facts = read_facts(folder, tokenizer_folder)
    refuse_draft_vocabulary(facts)
    vocabulary, fingerprint = facts.vocabulary, weights_fingerprint(folder)
    files = weight_files(folder)
    if facts.quantised:
        if facts.quantised != AWQ:
            check_scales(folder)
        if group is not None or facts.model_type in MIXER_FAMILIES:
            raise CheckpointError(
                f"{folder}: quantised weights ({facts.quantised}) are not supported in a model with mixers, nor with "
                "tensor_parallel above 1; name the bfloat16 or float16 checkpoint that it was made from"
            )
    logging.disable_progress_bar()  # a replica's log is no terminal
    try:
        config = library_config(folder)
    except CheckpointError:
        raise
    except Exception as error:  # a family's configuration class may raise anything
        raise why_not_read(folder, facts.config["model_type"], error) from error
    check_config(folder, config.to_dict())  # checked again, with the family's defaults for what the file leaves out
    try:
        settings: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION}
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported by name below
        loaded: Any
        if group is not None and config.model_type in MIXER_FAMILIES:
            deal = plan_shards(folder, config, group.rank, group.size)
            spread = DistributedConfig(tp_size=group.size, tp_plan=deal.plan)
            with deal.tensors(folder) as tensors:
                loaded = deal.kind.from_pretrained(None, state_dict=tensors, distributed_config=spread, **settings)
        else:
            if group is not None:
                check_divisible(folder, config.get_text_config(), group.size)
                settings["distributed_config"] = DistributedConfig(tp_size=group.size)
            loaded = load_library_model(folder, **settings)
    except (DistError, CheckpointError):  # another worker reports why, or the message is final
        raise
    except UnpicklingError as error:
        raise CheckpointError(f"{files[0]} is not a file of plain weights: {error}") from error
    except Exception as error:  # a broken checkpoint or a family's constructor may raise anything
        raise why_not_loaded(folder, files[0].name, config, error) from error
    model, info = loaded
    if lacking := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise CheckpointError(f"{folder}: {len(lacking)} tensors are missing or misshapen, among them {lacking[0]}")
    if isinstance(config, MambaInLlamaConfig) and (extra := sorted(info["unexpected_keys"])):
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors belong to no layer of {MAMBA_CONFIG}, among them {extra[0]}"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise FamilyError(folder, config.model_type, Property.NO_HEAD)
    outputs = head.out_features
    join = take_off_wrappers(folder, model) if group is not None else None
    model = model.to(device).eval().requires_grad_(False)
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 0  # XLNet's class says -1: it has no limit
    positions = facts.positions or (limit if limit > 0 else _learned_positions(model))
    run = ForwardContext(threads=threads if device.type == "cpu" else 1)
    packing = quantised_packing(facts, model) if device.type == "cpu" and group is None else None
    shared = group is not None and head.out_features < outputs
    in_blocks = device.type == "cpu" and not shared
    head_forms = RowForms(
        [bucket for bucket in buckets if bucket <= HEAD_ROWS or not in_blocks], run.threads, packing or PackedWeight
    )
    if group is not None and shared:
        product = _gathering_head(head, outputs, vocabulary, head_forms, group)
    else:
        product = _float_head(head, vocabulary, head_forms, 1 if device.type == "cpu" else HEAD_OUTPUTS)
    group_norms(model)
    library = library_logits(folder, model, product, vocabulary, positions) if group is None else {}
    seated = Head(model, product, together=shared)
    mixers = seat_mixers(folder, model, run, group)
    make_activations_safe(model)
    forms = RowForms(buckets, run.threads, packing or PackedWeight)
    seat_experts(model, forms)
    if device.type != "cpu" and group is None:
        join_weights(model)
    make_rows_independent(model, forms)
    if join is not None and group is not None:
        join(group)
    if device.type != "cpu":
        functions = use_norm_kernel(model, dtype, device)
    else:
        functions = use_row_functions(model) if group is None else 0
    for module in model.modules():
        module.dendro_seat = Seat(run)
    probe_layers(folder, model, run)
    by_kernels = device.type != "cpu" and run_from_tables(mixers) and not (mixers and group is not None)
    attention = _choose_attention(run, device, by_kernels)
    layouts = _layouts(run, by_kernels)
    stack: CompiledStack | None = None
    if run.compiled and group is None:
        use_attention_layers(model, run, positions, CompiledAttention())
        stack = use_decoder_layers(model, run, positions)
    if by_kernels and group is None:
        use_device_layers(model, run, positions, forms)
        use_device_blocks(model, run, vocabulary)
    tokens = short_text(vocabulary, positions)
    check_logits(folder, model, seated, run, mixers, tokens, library)
    if not mixers:
        check_layer_types(folder, model)
    last_layer = use_last_layer(model, run) if run.probed and not mixers and group is None else None
    return LoadedTarget(
        model=model,
        run=run,
        layouts=layouts,
        mixers=mixers,
        facts=facts,
        max_positions=positions,
        window=_window(run),
        fingerprint=fingerprint,
        by_kernels=by_kernels,
        own_arithmetic=forms.report().own or functions > 0 or run.compiled,
        linear=forms.report().beside(head_forms.report(), "the head's"),
        packing=packing,
        attention=attention,
        head=seated,
        last_layer=last_layer,
        direct=direct_forward(model, seated, stack, run, tokens, positions),
    )


def _float_head(head: nn.Linear, vocabulary: int, forms: RowForms, multiple: int = 1) -> Product:
    """The head's float32 logits of the tokenizer's tokens: in bfloat16 they would be rounded to steps of 1/8.

    multiple: the product's number of outputs is padded to a multiple of it; outputs past the tokens are dropped"""
    whole = -(-vocabulary // multiple) * multiple
    weight, bias = head.weight[:whole], None if head.bias is None else head.bias[:whole]
    if missing := whole - len(weight):  # a checkpoint usually has rows past the tokens
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    product = forms.in_float32(weight, bias)
    return product if whole == vocabulary else lambda hidden: product(hidden)[..., :vocabulary]


def _learned_positions(model: PreTrainedModel) -> int:
    """Number of positions of the shortest embedding of learned positions, for families whose configuration names their
    limit by a key that is not known here; 2**31 without such an embedding."""
    rows = [
        module.num_embeddings - getattr(module, "offset", 0)  # OPT's first position is row 2
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name.split(".")[-1] and "relative" not in name
    ]
    return min(rows, default=1 << 31)


def _gathering_head(head: nn.Linear, outputs: int, vocabulary: int, forms: RowForms, group: Collectives) -> Product:
    """The head's product where each worker has a part of its `outputs` rows; every worker gets all float32 logits."""
    form = forms.in_float32(head.weight, head.bias)

    def forward(hidden: Tensor) -> Tensor:
        return group.gather(form(hidden), outputs)[..., :vocabulary]

    return forward


def _choose_attention(run: ForwardContext, device: torch.device, by_kernels: bool) -> str:
    """Set the form of the attention of the probed layers. Returns the name of the form, with the reason where it is not
    compiled on a CPU. by_kernels: as in `LoadedTarget`"""
    if not run.probed:
        return ""
    if device.type != "cpu":
        return attention_on_device(run.probed) if by_kernels else "the library's products"
    layouts = {layer.layout for layer in run.probed}
    why = compiled.why_not_compiled() or next(filter(None, map(compiled.why_not_for, layouts)), "")
    run.compiled = not why
    return "compiled" if run.compiled else f"the library's products, as {why}"


def _layouts(run: ForwardContext, by_kernels: bool) -> tuple[Layout, ...]:
    """The layouts of the attention layers' pages, for the form of the attention. by_kernels: as in `LoadedTarget`"""
    if by_kernels:
        return device_layouts(run.probed)
    if run.compiled:
        return tuple(compiled.layout_for(layer.layout, layer.dtypes) for layer in run.probed)
    return tuple(layer.layout for layer in run.probed)


def _window(run: ForwardContext) -> int | None:
    """The widest sliding window of the layers; None where some layer sees all positions."""
    windows = [layer.window for layer in run.probed]
    return None if None in windows or not windows else max(window for window in windows if window is not None)
