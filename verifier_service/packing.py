"""Makes a step's plan from its texts' shares of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verifier_service.recurrent import recurrent_rows
from verifier_service.requests import Capacity, StepShare
from verifier_service.rows import NO_ROWS, StepPlan, pack, root_rows, text_rows
from verifier_service.walk import Draw, Echo


def packed(shares: Sequence[StepShare], capacity: Capacity) -> StepPlan:
    """Make the plan of a step with these shares, in this order."""
    parts, draws, echoes = [], [], []
    start, guesses, folds, wanted = 0, 0, 0, [NO_ROWS]
    alone = [(share.session.text.ids, share.session.memory.pages) for share in shares if share.is_root]
    roots = iter(root_rows(alone, capacity.near, capacity.window))
    for share in shares:
        session, tree = share.session, share.tree
        committed = len(session.memory.consumed) + np.arange(share.prefill)
        scratch = capacity.first_scratch + guesses
        if positions := share.echoed:
            tokens = session.text.ids[positions.start + 1 : positions.stop + 1]
            echoes.append(Echo(sum(map(len, wanted)), tuple(tokens), session.parameters.logprobs or 0))
            wanted.append(start + np.array(positions) - len(session.memory.consumed))
        if tree is not None:
            first = start + share.prefill
            place = sum(map(len, wanted))
            asked = session.parameters
            laws = session.warp, asked.sampling, session.history, asked.logprobs, session.structure
            draws.append(Draw(session.number, first, place, len(session.text.ids), tree, *laws))
            wanted.append(np.arange(first, first + tree.rows))
            guesses += tree.guesses
        given = session.text.ids, committed, tree, session.memory.pages, scratch, capacity.near, capacity.window
        part = next(roots) if share.is_root else text_rows(*given)
        if capacity.recurrent is not None and session.memory.place is not None:
            rows = recurrent_rows(
                session.memory.place,
                committed,
                len(session.text.ids) - 1,
                tree,
                capacity.recurrent.scratch + start,
                folds,
            )
            part = replace(part, recurrent=rows)
            folds += len(rows.folds)
        parts.append(part)
        start += len(part.tokens)
    return pack(parts, np.concatenate(wanted), draws, echoes)
