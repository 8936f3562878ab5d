"""Bad words and biases as texts, and special tokens in texts: what of a request reaches the target, and its text."""

from __future__ import annotations

from pathlib import Path

import pytest
from dendro.answer import build_request
from dendro.errors import BadRequest
from dendro.options import MAX_BAD_WORDS, MAX_BIASED_IDS, MAX_WORD_BYTES
from dendro.structure import Structure, StructureForm
from dendro.text import Finish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.api.local import LocalClient
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.sessions import MemorySessions
from tests.support import edge
from tests.support.edge import END, EdgePeers, ingress, resume_of
from tests.support.other_tokenizers import STYLES, loaded, templated


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    return loaded(tmp_path_factory.mktemp("style"), templated(STYLES[request.param]()))


def serving(peers: EdgePeers, tokenizer: CheckpointTokenizer) -> LocalClient:
    served = Served("demo", tokenizer, len(tokenizer._tokenizer), 512, frozenset({END}), "float32")
    return LocalClient(Ingress(edge.config(), peers, MemorySessions(), {"demo": served}))


# Words


async def test_a_bad_word_is_its_tokens_alone_and_after_a_space_and_a_bias_is_one_tokens(style: CheckpointTokenizer):
    peers = EdgePeers()
    await serving(peers, style).generate_text(
        "the", max_new_tokens=1, bad_words=["cat", [5, 6], " sat"], logit_bias={"t": 2.5, 7: -1.0}
    )
    sampling = peers.texts[-1].sampling
    of = {text: tuple(style.encode(text, begins=False)) for text in ("cat", " cat", " sat", "t")}
    assert sampling.bad_words == ((5, 6), of["cat"], of[" cat"], of[" sat"])
    assert len(of["t"]) == 1 and dict(sampling.logit_bias) == {7: -1.0, of["t"][0]: 2.5}
    for text, ids in of.items():
        prompt = style.encode("the", begins=True)
        assert style.decode(prompt + list(ids)) == style.decode(prompt) + text


async def test_texts_make_the_request_that_their_ids_make():
    plain, given = EdgePeers(), EdgePeers()
    texts = {"bad_words": ["ab", " c"], "logit_bias": {"a": 1.0, "b": 2.0}}
    ids = {"bad_words": [[97, 98], [32, 97, 98], [32, 99]], "logit_bias": {97: 1.0, 98: 2.0}}
    for peers, options in ((plain, ids), (given, texts)):
        await LocalClient(ingress(peers)).generate_text("the", max_new_tokens=2, seed=1, **options)
    assert plain.texts[-1].sampling == given.texts[-1].sampling


@pytest.mark.parametrize(
    "field, reason, options",
    [
        ("bad_words['']", "is empty", {"bad_words": [""]}),
        ("bad_words['yyy", "has 1025 bytes; at most", {"bad_words": ["y" * (MAX_WORD_BYTES + 1)]}),
        ("bad_words['yyy", "has 65 tokens; must have 1 to 64", {"bad_words": ["a", "y" * 64]}),
        ("bad_words", f"at most {MAX_BAD_WORDS}", {"bad_words": ["y", *[[5]] * MAX_BAD_WORDS]}),
        ("bad_words", f"at most {MAX_BAD_WORDS}", {"bad_words": [f"{at}" for at in range(MAX_BAD_WORDS)]}),
        ("bad_words[0]", "must be a text|surrogate", {"bad_words": ["\ud800"]}),
        ("logit_bias['ab']", "has 2 tokens of this target; a bias needs one", {"logit_bias": {"ab": 1.0}}),
        ("logit_bias['']", "is empty", {"logit_bias": {"": 1.0}}),
        ("logit_bias['a']", "is the token 97, which has a bias already", {"logit_bias": {"a": 1.0, 97: 1.0}}),
        ("logit_bias['a']", "must lie in", {"logit_bias": {"a": 101.0}}),
        ("logit_bias['a']", "must lie in", {"logit_bias": {"a": float("nan")}}),
        ("logit_bias['a']", "is no bias", {"logit_bias": {"a": "much"}}),
        ("logit_bias", f"at most {MAX_BIASED_IDS}", {"logit_bias": {f"{at}": 1.0 for at in range(MAX_BIASED_IDS + 1)}}),
        ("allowed_ids", "may leave no token", {"allowed_ids": [97], "bad_words": ["a"]}),
        ("bad_words", "structure", {"bad_words": ["a"], "structure": Structure(StructureForm.REGEX, ("a",))}),
    ],
)
async def test_a_text_that_cannot_be_such_tokens_is_refused_by_its_field(field: str, reason: str, options: dict):
    with pytest.raises(BadRequest, match=reason) as refused:
        await LocalClient(ingress(EdgePeers())).generate_text("the", max_new_tokens=2, **options)
    assert refused.value.field.startswith(field)


async def test_a_text_without_tokens_of_its_own_is_refused_where_it_would_ban_or_favour_all_such_texts(tmp_path: Path):
    """A tokenizer without byte tokens, as T5's: every character that it lacks is `<unk>`."""
    vocabulary = [("<unk>", 0.0), *((each, -1.0) for each in ("▁", "t", "h", "e", "▁the"))]
    made = Tokenizer(models.Unigram(vocabulary, 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["<unk>"])
    client = serving(EdgePeers(), loaded(tmp_path, made))
    for options in ({"logit_bias": {"漢": 5.0}}, {"bad_words": ["e漢"]}):
        (field,) = options
        with pytest.raises(BadRequest, match="has characters that the target has no tokens for") as refused:
            await client.generate_text("the", max_new_tokens=1, **options)
        assert refused.value.field.startswith(field)
    await client.generate_text("the", max_new_tokens=1, logit_bias={"t": 1.0, "<unk>": -5.0}, bad_words=["the"])


# Special tokens


@pytest.fixture
def five_letters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(edge, "next_token", lambda ids, its: END if len(ids) == 3 + 5 else 97 + len(ids))


@pytest.mark.usefixtures("five_letters")
async def test_special_tokens_are_shown_in_the_text_where_a_request_asks():
    client = LocalClient(ingress(EdgePeers()))
    prompt = [END, *b"ab"]
    for way in ("off", "(1,1,1)"):
        plain = await client.generate_text(prompt, echo=True, speculation=way)
        shown = await client.generate_text(prompt, echo=True, speculation=way, show_special_tokens=True)
        assert plain.token_ids == shown.token_ids and plain.token_ids[-1] == END
        assert shown.text == plain.text + "<end>"
        assert [each.text for each in plain.prompt + shown.prompt] == ["ab", "<end>ab"]
        for stop, text in (("<e", plain.text), ("d>", plain.text + "<en")):
            stopped = await client.generate_text(prompt, speculation=way, show_special_tokens=True, stop=stop)
            assert (stopped.text, stopped.complete.finish) == (text, Finish.STOP_STRING)
    whole = plain.token_ids
    for held in range(len(whole) + 1):
        request = build_request(prompt, show_special_tokens=True)
        request.resume.CopyFrom(resume_of(prompt, whole[:held]))
        events = [event async for event in ingress(EdgePeers()).generate(request)]
        text = bytes(token for token in whole[:held] if token < END).decode()
        rest = "".join(event.chunk.text for event in events)
        assert text + ("<end>" if held == len(whole) else "") + rest == shown.text


def test_special_tokens_are_shown_by_every_kind_of_tokenizer(style: CheckpointTokenizer):
    ids = style.encode("the cat</s> sat", begins=True)
    text = style.showing().decode(ids)
    assert text.startswith("<s>") and "</s>" in text and style.showing().visible(ids) == ids
    assert text.replace("<s>", "").replace("</s>", "").split() == style.decode(ids).split() == ["the", "cat", "sat"]


@pytest.mark.parametrize("text", ["a</s>b", "</s>", "<s>[INST] </s></s>", " </s> <unk>", "the </s"])
def test_a_literal_prompt_has_no_special_token_of_its_text(style: CheckpointTokenizer, text: str):
    start, end = (style.backend.token_to_id(each) for each in ("<s>", "</s>"))
    assert {start, end} & set(style.encode(text, begins=False)) or text == "the </s"
    for begins in (True, False):
        ids = style.encode_literally(text, begins)
        assert ids[: len(style.head)] == list(style.head) or not begins
        own = ids[1:] if begins else ids
        assert not {start, end} & set(own)
        before = style.encode("per", begins=True)
        assert begins or style.decode(before + own) == style.decode(before) + text
        assert not begins or style.decode(own).strip() == text.strip()
    plain = "the cat sat"
    assert style.encode_literally(plain, True) == style.encode(plain, True)
    assert style.encode_literally(plain, False) == style.encode(plain, False)


async def test_a_literal_prompt_is_read_literally_in_every_turn(style: CheckpointTokenizer):
    peers = EdgePeers()
    client, end = serving(peers, style), style.backend.token_to_id("</s>")
    first = await client.generate_text("a</s>b", literal_prompt=True, max_new_tokens=1, keep_session=True)
    text = style.encode_literally("a</s>b", begins=True)
    assert peers.texts[-1].ids[: len(text)] == text and end not in text
    text += [*first.token_ids, *style.encode_literally("</s>", begins=False)]
    await client.generate_text("</s>", literal_prompt=True, max_new_tokens=1, session=first.complete.session)
    assert peers.texts[-1].ids[: len(text)] == text and end not in text
    await client.generate_text("a</s>b", max_new_tokens=1)
    assert end in peers.texts[-1].ids


async def test_a_literal_prompt_of_ids_is_refused():
    with pytest.raises(BadRequest, match="^literal_prompt: is about a prompt's text"):
        await LocalClient(ingress(EdgePeers())).generate_text([1, 2], literal_prompt=True)


async def test_a_special_token_of_one_character_is_ordinary_text_in_a_literal_prompt(tmp_path: Path):
    """Such as a padding token `!`, and one that the vocabulary lacks."""
    tokenizer = STYLES["byte-level"]()
    tokenizer.add_special_tokens(["!", "é"])
    made = loaded(tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast", pad_token="!")
    ids = made.encode_literally("a!é", begins=True)
    assert made.showing().decode(ids) == "a!é" and tokenizer.token_to_id("é") not in ids


async def test_samples_of_a_literal_prompt_have_its_tokens():
    peers = EdgePeers()
    done = await LocalClient(ingress(peers)).generate_samples(
        "abc", n=3, literal_prompt=True, show_special_tokens=True, bad_words=["x"], max_new_tokens=4
    )
    assert [each.started.sample for each in done] == [0, 1, 2]
    assert {tuple(text.ids[:3]) for text in peers.texts} == {tuple(b"abc")}
    assert {text.sampling.bad_words for text in peers.texts} == {((120,), (32, 120))}
