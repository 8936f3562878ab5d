"""A vocabulary transplanted: rows of equal tokens, means of pieces, and a model that says the same under other ids."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from tree_layers.checkpoint import Facts, read_facts

from cluster.config import DEMO_MODELS, Config
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training.drafter import held_out_loss, train_drafter
from cluster.training.models import checked_target, new_student, start_from, student_from
from cluster.training.transplant import Transplant, transplant
from drafter_service.training.sizes import SIZES
from tests.support import tiny_mamba
from tests.support.small_training import CPU, WORDS, plan_of, write_cluster, write_text

LETTER = bytes_to_unicode()


def byte_level(folder: Path, words: list[bytes], single_bytes: bool = True) -> None:
    """A byte-level tokenizer of 0, the end of text, of these words, and of all bytes."""
    spelt = ["".join(LETTER[byte] for byte in word) for word in words]
    singles = [letter for letter in LETTER.values() if letter not in spelt] if single_bytes else []
    vocabulary = {text: token for token, text in enumerate(["<end>", *spelt, *singles])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def sentencepiece(folder: Path, words: list[str]) -> None:
    """A tokenizer in SentencePiece's style: 0, the end of text, then these words, and byte tokens."""
    texts = ["<end>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(texts)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def checkpoint(folder: Path, rows: int = 300) -> tuple[Facts, CheckpointTokenizer]:
    """A tiny Mamba of the folder's tokenizer."""
    saved = (folder / "tokenizer.json").read_bytes()
    config = tiny_mamba.tiny_config("mamba2", rows, n_groups=1, eos_token_id=0, tie_word_embeddings=False)
    tiny_mamba.make_checkpoint(folder, "mamba2", config=config)
    (folder / "tokenizer.json").write_bytes(saved)
    facts = read_facts(folder)
    return facts, CheckpointTokenizer(folder, facts.tokenizer)


def test_equal_tokens_keep_their_rows_and_others_get_the_mean_of_their_longest_pieces(tmp_path: Path) -> None:
    """By hand: the target's words are the checkpoint's, its pieces, half a character, and one with a missing byte."""
    byte_level(tmp_path / "ours", [b" the", b" there", "é".encode(), b"xyz", b"ab"], single_bytes=False)
    sentencepiece(tmp_path / "theirs", ["\u2581the", "re", "\u2581th", "ere", "é", "xy"])
    ours, our_tokenizer = checkpoint(tmp_path / "ours", 8)
    theirs, their_tokenizer = checkpoint(tmp_path / "theirs")
    made = transplant(ours, theirs, our_tokenizer, their_tokenizer)
    z, a, b = (7 + ord(letter) for letter in "zab")
    assert made.pieces == ((0,), (1,), (1, 2), (5,), (6, z), (a, b))
    weight = torch.randn(300, 5)
    rows = made.rows(weight)
    expected = [weight[[1]], weight[[1, 2]], weight[[5]], weight[[6, z]], weight[[a, b]]]
    torch.testing.assert_close(rows[1:], torch.stack([each.mean(0) for each in expected]))
    assert torch.equal(rows[1], weight[1])
    assert made.words == (
        "of 6 tokens 3 have the row of a token, 3 the mean row of their pieces, and 0 the mean of all rows"
    )


def test_control_tokens_keep_the_row_of_the_same_control_token_and_are_never_cut_into_pieces(tmp_path: Path) -> None:
    for name, controls in (("ours", ["<tool>", "<user>"]), ("theirs", ["<user>"])):
        byte_level(tmp_path / name, [b" the"])
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        tokenizer.add_special_tokens(controls)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    ours, our_tokenizer = checkpoint(tmp_path / "ours")
    theirs, their_tokenizer = checkpoint(tmp_path / "theirs")
    made = transplant(ours, theirs, our_tokenizer, their_tokenizer)
    assert made.pieces[-2:] == ((), (258,)) and theirs.tokens.texts[258] == "<user>"


def test_a_token_of_which_a_byte_is_missing_gets_the_mean_of_all_rows() -> None:
    weight = torch.randn(4, 3)
    rows = Transplant(((2,), (), (0, 3))).rows(weight)
    torch.testing.assert_close(rows, torch.stack([weight[2], weight.mean(0), (weight[0] + weight[3]) / 2]))


def test_a_model_says_the_same_under_the_ids_of_a_tokenizer_with_the_same_tokens(tmp_path: Path) -> None:
    """The target has the checkpoint's tokens in another order: its logits are the checkpoint's in that order."""
    words = [b" the", b"re", b"ing", b"\n\n"]
    byte_level(tmp_path / "theirs", words)
    byte_level(tmp_path / "ours", words[::-1])
    ours, our_tokenizer = checkpoint(tmp_path / "ours")
    theirs, _ = checkpoint(tmp_path / "theirs")
    start = start_from(tmp_path / "theirs", None, ours)
    made = start.transplant(ours, tmp_path / "ours")
    assert made is not None
    order = torch.tensor([pieces[0] for pieces in made.pieces])
    assert sorted(order.tolist()) == list(range(theirs.vocabulary)) and order.tolist()[1:5] == [4, 3, 2, 1]
    before = tiny_mamba.Mamba2ForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    after = student_from(start, ours, made, seed=0, device=CPU).eval()
    ids = torch.randint(ours.vocabulary, (2, 20))
    with torch.no_grad():
        expected = before(order[ids]).logits[..., order]
        torch.testing.assert_close(after(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_drafter_of_another_tokenizer_is_continued_and_its_card_says_how(tmp_path: Path) -> None:
    byte_level(tmp_path / "start", [b"w4", b"w1"])
    checkpoint(tmp_path / "start")
    cluster = write_cluster(tmp_path)
    facts = checked_target("llama", Config.load(cluster).targets["llama"])
    start = start_from(tmp_path / "start", None, facts)
    plan = plan_of(cluster, write_text(tmp_path), start=start, size=None)
    train_drafter(plan)
    assert read_facts(plan.out).tokenizer == plan.facts.tokenizer
    card = " ".join((plan.out / "README.md").read_text().split())
    kept = f"of {WORDS} tokens 2 have the row of a token, {WORDS - 3} the mean row of their pieces, and 1 the mean of"
    assert kept in card  # the unknown token has no bytes


def test_the_demos_drafter_knows_python_under_a_tokenizer_of_another_size(tmp_path: Path) -> None:
    """Its loss on text that it was not trained on, right after the transplant, is far below that of random weights."""
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train([str(file) for file in sorted((library / "asyncio").glob("*.py"))], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, _ = checkpoint(tmp_path, 1024)
    start = start_from(DEMO_MODELS / "mamba2", None, ours)
    made = start.transplant(ours, tmp_path)
    assert made is not None and all(made.pieces)
    assert sum(len(pieces) == 1 for pieces in made.pieces) > 700
    tokens = np.array(tokenizer.encode((library / "textwrap.py").read_text()).ids)
    after = held_out_loss(student_from(start, ours, made, 0, CPU), tokens, 256)
    rows = torch.randn(1024, 176, generator=torch.Generator().manual_seed(0))
    random = held_out_loss(new_student("mamba2", SIZES["mamba2"]["tiny"], ours, rows, None, 0, CPU), tokens, 256)
    assert after < random - 1.5


def test_a_vocabulary_without_a_common_byte_is_refused(tmp_path: Path) -> None:
    byte_level(tmp_path / "ours", [b"ab"], single_bytes=False)
    byte_level(tmp_path / "theirs", [b"xy"], single_bytes=False)
    ours, our_tokenizer = checkpoint(tmp_path / "ours", 8)
    theirs, their_tokenizer = checkpoint(tmp_path / "theirs", 8)
    with pytest.raises(BadRequest, match="^--from: no token of .*theirs has bytes of the target's tokens"):
        transplant(ours, theirs, our_tokenizer, their_tokenizer)
