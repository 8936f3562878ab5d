"""llama.cpp beside ours in `dendro bench speed`: the same weights as GGUF, in a process that may fail in any way."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dendro.errors import BadRequest, EngineFailed

from cluster.measure import gguf_file
from cluster.measure.baselines import Baselines
from cluster.measure.gguf_file import check_exportable, interleaved, write_gguf
from cluster.measure.llama_cpp import llama_cpp_process
from cluster.measure.measurement import GENERATE, LLAMA_CPP, LLAMA_CPP_LOOKUP, LLAMA_CPP_ROWS
from cluster.measure.processes import failure_in
from tests.support.tiny_hybrids import make_checkpoint as make_hybrid
from tests.support.tiny_models import PADDED, make_checkpoint


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skips where a library is not installed. One that is installed and broken fails."""
    missing = [library for library in libraries if find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: the extra `llama` is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder)
    return folder


# The GGUF file


@needs("gguf", "llama_cpp")
@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}, {"head_dim": 32}, {"num_key_value_heads": 4}])
def test_llama_cpp_has_transformers_logits_for_an_exported_llama(tmp_path, settings):
    """At an absolute difference of 1e-3, of logits of size 1: both compute in float32, in another order."""
    from llama_cpp import Llama

    model = make_checkpoint(tmp_path, seed=5, **settings)
    write_gguf(tmp_path, tmp_path / "model.gguf", "float32")
    float32 = {"type_k": 0, "type_v": 0}
    exported = Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, n_threads=1, verbose=False, **float32)
    ids = torch.randint(PADDED, (1, 40), generator=torch.Generator().manual_seed(2))
    exported.eval(ids[0].tolist())
    with torch.no_grad():
        expected = model(ids).logits[0]
    found = torch.tensor(exported.scores[: ids.shape[1]])
    exported.close()
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@needs("gguf")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matrices_are_stored_bit_for_bit_and_norms_in_float32(llama, tmp_path, dtype):
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    write_gguf(llama, tmp_path / "model.gguf", dtype)
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    weights = AutoModelForCausalLM.from_pretrained(llama, dtype=getattr(torch, dtype)).state_dict()
    down = weights["model.layers.1.mlp.down_proj.weight"]
    assert found["blk.1.ffn_down.weight"].tensor_type.name == gguf_file.GGUF_TYPES[dtype]
    assert found["blk.1.ffn_down.weight"].data.tobytes() == down.view(torch.uint8).numpy().tobytes()
    assert found["output_norm.weight"].tensor_type.name == "F32"
    assert len(found) == len(weights)


def test_a_heads_halves_are_interleaved():
    rows = torch.arange(8.0)[:, None]  # two heads of width 4
    assert interleaved(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "mistral"}, "its model_type is 'mistral'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its quantization_config is {'quant_method': 'fp8'}"),
        ({"hidden_act": "gelu"}, "its hidden_act is 'gelu'"),
        ({"attention_bias": True}, "its attention_bias is True"),
        ({"mlp_bias": True}, "its mlp_bias is True"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "its rope_parameters.rope_type is 'linear'",
        ),
    ],
)
def test_what_the_file_cannot_say_is_refused_by_its_property(llama, tmp_path, changes, reason):
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadRequest) as refused:
        check_exportable(tmp_path, "bfloat16")
    assert reason in str(refused.value)


def test_a_dtype_that_the_file_cannot_have_is_refused(llama):
    check_exportable(llama, "bfloat16")
    with pytest.raises(BadRequest, match="its dtype is float64"):
        check_exportable(llama, "float64")


# The process

FAKE = """
import os, signal, sys
__version__ = "0.3.99"
def llama_print_system_info():
    return b"CPU : AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | "
{on_import}
class Llama:
    def __init__(self, path, *, n_ctx, n_threads, draft_model, **options):
        self.path, self.n_threads, self.n_ctx, self.seen = path, n_threads, n_ctx, []
        {on_load}
    def reset(self):
        self.seen = []
    def set_seed(self, seed):
        self.seed = seed
    def eval(self, tokens):
        self.seen += tokens
    def generate(self, prompt, *, temp, **options):
        tokens = list(prompt)
        while True:
            {on_answer}
            self.eval(tokens)
            tokens = [sum(self.seen) % 97]
            yield tokens[0]
"""
KILLED = "os.kill(os.getpid(), signal.SIGILL)"
LOGGED = "options['verbose'] and print('loading\\nload: error loading model: bad magic', file=sys.stderr)"


def installed_fake(monkeypatch, folder: Path, on_import: str = "", on_load: str = "pass", on_answer: str = "pass"):
    """Libraries of these names, before any others: gguf in this process, llama_cpp in those that it starts."""
    package = folder / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE.format(on_import=on_import, on_load=on_load, on_answer=on_answer))
    (package / "llama_speculative.py").write_text(
        "class LlamaPromptLookupDecoding:\n    __init__ = lambda *sizes: None"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    monkeypatch.setattr(gguf_file, "write_gguf", lambda checkpoint, file, dtype: file.write_bytes(b"GGUF"))


async def test_both_rows_answer_without_our_threads_settings_and_without_earlier_answers(llama, tmp_path, monkeypatch):
    installed_fake(monkeypatch, tmp_path, on_load="assert 'OMP_WAIT_POLICY' not in os.environ and n_threads == 2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    async with llama_cpp_process(llama, "bfloat16", 2, positions=20) as process:
        assert process.facts == {"version": "0.3.99", "instructions": ["AVX2", "OPENMP"]}
        answers = [await process.answer(row, [3, 5], 0.0, 1, 4) for row in (*LLAMA_CPP_ROWS, LLAMA_CPP)]
        with pytest.raises(EngineFailed, match="temperature 1"):
            await process.answer(LLAMA_CPP_LOOKUP, [3, 5], 1.0, 1, 4)
    assert {answer.tokens for answer in answers} == {(8, 16, 32, 64)}
    assert all(answer.first_tokens == 1 and answer.round_count == 4 for answer in answers)
    assert all(0 < answer.first_seconds <= answer.seconds for answer in answers)


@pytest.mark.parametrize(
    "faults, reason",
    [
        (
            {"on_import": "raise ModuleNotFoundError('no', name='llama_cpp')"},
            "llama.cpp: llama_cpp is not installed; the extra `llama` has it",
        ),
        (
            {"on_import": "raise ModuleNotFoundError('No module named diskcache', name='diskcache')"},
            "llama.cpp: llama_cpp cannot be imported: No module named diskcache",
        ),
        (
            {"on_import": "raise OSError('libllama.so: cannot open shared object file')"},
            "llama.cpp: llama_cpp cannot be imported: OSError: libllama.so: cannot open shared object file",
        ),
        ({"on_import": KILLED}, "llama.cpp: its process was ended by SIGILL"),
        ({"on_load": KILLED}, "llama.cpp: its process was ended by SIGILL"),
        ({"on_load": "os._exit(3)"}, "llama.cpp: its process ended with status 3"),
        (
            {"on_load": f"{LOGGED}; raise ValueError('Failed to load model from file')"},
            "llama.cpp: the model cannot be loaded: ValueError: Failed to load model from file "
            "(its log: load: error loading model: bad magic)",
        ),
    ],
    ids=["missing", "dependency", "library", "killed-at-import", "killed-at-load", "exits", "bad-file"],
)
async def test_a_llama_cpp_that_does_not_start_has_its_cause_in_a_sentence(
    llama, tmp_path, monkeypatch, faults, reason
):
    installed_fake(monkeypatch, tmp_path, **faults)
    with pytest.raises(EngineFailed) as failed:
        async with llama_cpp_process(llama, "bfloat16", 2, positions=20):
            raise AssertionError("it started")
    assert str(failed.value) == reason


async def test_a_llama_cpp_that_dies_while_it_answers_names_the_signal(llama, tmp_path, monkeypatch):
    installed_fake(monkeypatch, tmp_path, on_answer=KILLED)
    async with llama_cpp_process(llama, "bfloat16", 2, positions=20) as process:
        for _ in range(2):  # also when it has already ended
            with pytest.raises(EngineFailed, match="its process was ended by SIGILL"):
                await process.answer(LLAMA_CPP, [3, 5], 0.0, 1, 4)


async def test_without_gguf_its_name_and_the_extra_are_named(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineFailed, match="gguf is not installed; the extra `llama` has it"):
        await llama_cpp_process(llama, "bfloat16", 2, positions=20).__aenter__()


async def test_a_target_of_another_family_is_not_exported_whatever_is_installed(tmp_path, monkeypatch):
    make_hybrid(tmp_path, "mamba2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineFailed, match=r"^not exported: its model_type is 'mamba2'"):
        await llama_cpp_process(tmp_path, "bfloat16", 2, positions=20).__aenter__()


def test_the_first_line_of_a_log_that_reports_a_failure_is_its_cause():
    log = "llama_model_loader: loaded meta data\n  load: error loading model: no vocab\nfailed to load model\n"
    assert failure_in(log) == "load: error loading model: no vocab"
    assert failure_in("all is well\n") == ""


@needs("gguf", "llama_cpp")
async def test_both_rows_answer_with_the_targets_tokens(llama):
    """In float32, where no two of this model's likeliest tokens are closer than the rounding of its arithmetic."""
    baselines = Baselines(llama, None, "float32", threads=1)
    prompt = [3, 5, 7, 3, 5, 7, 3, 5]
    async with llama_cpp_process(llama, "float32", 1, positions=48) as process:
        answers = {row: await process.answer(row, prompt, 0.0, 0, 32) for row in LLAMA_CPP_ROWS}
        again = await process.answer(LLAMA_CPP, prompt, 0.0, 0, 32)
    expected = baselines.answer(GENERATE, prompt, 0.0, 0, 32).tokens
    assert {answer.tokens for answer in (*answers.values(), again)} == {expected}
    assert answers[LLAMA_CPP].round_count == 32 > answers[LLAMA_CPP_LOOKUP].round_count
