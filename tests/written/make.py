"""Writes what a commit stores of a session: its record, and the states of two drafters and of two targets.

    git worktree add --detach /tmp/old COMMIT
    cd /tmp/old && PYTHONPATH=.:protos:kernels python CHECKOUT/tests/written/make.py CHECKOUT/tests/written/COMMIT

It imports the commit's own packages, loads the bundled demo models, and writes into the folder:

- `session.json`: by target, the session's id, its drafter, the requests and answers of the turns, the tokens of the
  whole text, and the names of the states in the store with their files
- `TARGET.record`: the record as it is in Redis
- `TARGET.NUMBER.state`: a state that an engine saved at the end of the last turn, as it is in Redis

tests/cluster/test_written_before.py reads them with the present code.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from dendro.answer import build_request
from dendro.state import MemoryStates

from cluster.config import DEMO_MODELS, Config
from cluster.peers.pools import LocalPeers
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions

TOKENS = 12
PROMPTS = ("def area(radius):\n", "\n\n\ndef main():\n", "\n    return")
PAIRS = (("target", "mamba"), ("mamba2", "mamba2"))
"""Targets and drafters: a target with attention, and a state-space one, whose states are saved too."""


def config_of(target: str, drafter: str) -> Config:
    shared = {"dtype": "float32", "threads": 1}
    return Config.of(
        {
            "targets": {"t": {"checkpoint": DEMO_MODELS / target, "max_length": 256, **shared}},
            "drafters": {"d": {"checkpoint": DEMO_MODELS / drafter, **shared}},
        },
        Path.cwd(),
    )


async def written(target: str, drafter: str, folder: Path) -> dict[str, object]:
    """Write the files of one pair; returns what `session.json` says of it."""
    states, sessions = MemoryStates(), MemorySessions()
    config = config_of(target, drafter)
    peers = LocalPeers.load(config, states)
    await peers.start()
    router = Ingress(config, peers, sessions)
    token, turns = "", list[dict[str, object]]()
    for number, prompt in enumerate(PROMPTS):
        begin = {"session": token} if token else {"keep_session": True}
        request = build_request(
            prompt,
            max_new_tokens=TOKENS,
            temperature=0.8,
            seed=7 + number,
            speculation="(2,1)",
            request_id=f"turn-{number}",
            **begin,
        )
        started, tokens = None, list[int]()
        async for response in router.generate(request):
            if response.WhichOneof("event") == "started":
                started = response.started
            tokens += response.chunk.token_ids
        assert started is not None
        token = response.complete.session
        turns.append(
            {
                "prompt": prompt,
                "prompt_tokens": started.prompt_tokens,
                "seed": started.seed,
                "target": started.target,
                "tokens": tokens,
                "finish": response.complete.finish_reason,
            }
        )
    ((name, (blob, _)),) = sessions._records.items()
    record = await sessions.read(token, "")
    await peers.close()
    (folder / f"{target}.record").write_bytes(blob)
    last = states_of_length(states, {len(record.tokens), len(record.tokens) - 1})
    names: dict[str, str] = {}
    facts: dict[str, object] = {"session": name, "drafter": drafter, "turns": turns}
    for name, state in sorted(last.items()):
        names[name] = f"{target}.{len(names)}.state"
        (folder / names[name]).write_bytes(state)
    return facts | {"states": names, "tokens": list(record.tokens)}


def states_of_length(states: MemoryStates, lengths: set[int]) -> dict[str, bytes]:
    """The states after so many tokens."""
    found: dict[str, bytes] = {}
    for name, blob in states.blobs.items():
        header = json.loads(blob[10 : 10 + int.from_bytes(blob[6:10], "little")])
        if header["tokens"] in lengths:
            found[name] = blob
    return found


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {target: asyncio.run(written(target, drafter, folder)) for target, drafter in PAIRS}
    (folder / "session.json").write_text(json.dumps(facts, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
