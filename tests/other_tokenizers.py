"""Token ids that differ: the same tokens under other ids, and tokenizers trained on other text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|end|>"


def permuted_ids(count: int, seed: int = 7) -> np.ndarray:
    """[count] the new id of each id."""
    return np.random.default_rng(seed).permutation(count)


def write_permuted(source: Path, folder: Path) -> np.ndarray:
    """A checkpoint with the tokens and weights of `source`, whose tokens have other ids; returns `permuted_ids`."""
    shutil.copytree(source, folder)
    form = json.loads((source / "tokenizer.json").read_text())
    vocabulary = form["model"]["vocab"]
    new = permuted_ids(1 + max([*vocabulary.values(), *(added["id"] for added in form["added_tokens"])]))
    form["model"]["vocab"] = {text: int(new[token]) for text, token in vocabulary.items()}
    for added in form["added_tokens"]:
        added["id"] = int(new[added["id"]])
        # An added token that the vocabulary lacks would get the id after the vocabulary's, whatever is written here.
        form["model"]["vocab"][added["content"]] = added["id"]
    (folder / "tokenizer.json").write_text(json.dumps(form))
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "embed" in name or "lm_head" in name:
            moved = weight.clone()
            moved[torch.from_numpy(new)] = weight[: len(new)]
            weights[name] = moved
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if config.get(key) is not None:
                config[key] = int(new[config[key]])
        (folder / name).write_text(json.dumps(config))
    return new


def byte_level(texts: Iterable[str], count: int) -> Tokenizer:
    """A byte-level BPE trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=count, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def metaspace(texts: Iterable[str], count: int) -> Tokenizer:
    """A BPE of SentencePiece's kind, as Llama 2's: a space first, `▁` for spaces, byte tokens for other characters."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words, lines = pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, lines])
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=count - 259, show_progress=False))
    form = json.loads(trained.to_str())
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(form["model"]["vocab"], key=form["model"]["vocab"].__getitem__)
    vocabulary = {piece: token for token, piece in enumerate([*heads, *pieces])}
    merges = [tuple(pair) for pair in form["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(heads[:3])
    return tokenizer
