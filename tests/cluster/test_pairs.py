"""Published pairs, shrunk but with their facts: each loads, drafts, and changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dendro.speculation import Speculation
from tree_layers.checkpoint import read_facts
from tree_layers.tokens import read_tokens

from cluster.certify import command as certify_command
from cluster.checkpoints import read_cluster
from cluster.config import Config, TargetConfig
from cluster.demo.prompts import load_passages
from cluster.pairing import fit_of
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.running import local_client
from cluster.tune.prompts import choose_prompts
from tests import published
from tests.published import COMMON, PAGE, PAIRS, UNRELATED, PublishedPair

pytestmark = pytest.mark.usefixtures("opened_drafters")

PROMPT = [5, 9, 300, 4000, 77, 31]


@pytest.mark.parametrize(
    "pair", [pair if pair in COMMON else pytest.param(pair, marks=pytest.mark.long) for pair in PAIRS], ids=str
)
async def test_a_published_pair_loads_drafts_and_changes_no_token(tmp_path: Path, pair: PublishedPair):
    config = Config.load(published.write_pair(pair, tmp_path))
    facts = read_cluster(config)
    target, drafter = facts.targets["t"], facts.drafters["d"]
    assert (target.rows, drafter.rows) == (pair.target.rows, pair.drafter.rows)
    assert target.vocabulary == (pair.tokenizer or pair.target).words.size
    assert fit_of(target, drafter) == pair.fit()  # as on the page, for the published numbers
    async with local_client(config) as client:
        wanted = await client.generate_text(PROMPT, max_new_tokens=16, speculation=Speculation.parse("off"))
        for shape in ("(1,1,1)", "(2,2)"):
            done = await client.generate_text(PROMPT, max_new_tokens=16, speculation=Speculation.parse(shape))
            assert done.complete.speculation.drafted_tokens > 0
            assert done.token_ids == wanted.token_ids
    assert max(wanted.token_ids) < target.vocabulary


@pytest.mark.parametrize("pair", UNRELATED, ids=str)
def test_a_drafter_of_another_family_is_refused(pair: PublishedPair):
    assert not pair.fit().fits


def test_the_written_tokenizer_files_have_the_declared_tables(tmp_path: Path):
    """tokenizer.model and tokenizer.json of one tokenizer give the same table, and the library reads the former."""
    for name, model in (("spm", published.VICUNA), ("json", published.TINY_LLAMA)):
        (tmp_path / name).mkdir()
        published.write_tokenizer(model, tmp_path / name)
        assert read_tokens(tmp_path / name) == published.LLAMA2.table()
    tokenizer = CheckpointTokenizer(tmp_path / "spm", "")
    assert tokenizer.decode(tokenizer.encode("h\u00e9, Llama", True)) == "h\u00e9, Llama"


@pytest.mark.parametrize("kind", ["a tokenizer.model", "in Python"])
def test_certify_and_tune_encode_prompts_as_a_router_does(tmp_path: Path, kind: str):
    if kind == "in Python":
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    else:
        published.write_tokenizer(published.VICUNA, tmp_path)  # tokenizer.model alone
    router = CheckpointTokenizer(tmp_path, "")
    texts = [tuple(router.encode(passage.text, begins=True)) for passage in load_passages()]
    tuned = choose_prompts(None, TargetConfig(checkpoint=tmp_path), "t", 1, 8)
    for prompt in (*certify_command._prompts(2, tmp_path), *tuned.ids):
        assert any(text[: len(prompt)] == tuple(prompt) for text in texts)


def test_stale_keys_of_the_hf_mambas_are_ignored(tmp_path: Path):
    for number, model in enumerate((published.MAMBA_370M_HF, published.MAMBA_790M_HF)):
        facts = read_facts(published.make(model, tmp_path / str(number), seed=0))
        assert (facts.layout, facts.config["hidden_size"], facts.rows) == ("transformers", 32, 50280)


def test_the_page_of_pairs_is_up_to_date():
    assert PAGE.read_text() == published.page(), "run: python -m tests.published"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_configuration_on_the_page_is_valid(pair: PublishedPair, tmp_path: Path):
    config = Config.of(yaml.safe_load(published.configuration(pair)), tmp_path)
    assert [target.checkpoint_name for target in config.targets.values()] == [pair.target.name]
    assert [drafter.checkpoint_name for drafter in config.drafters.values()] == [pair.drafter.name]
