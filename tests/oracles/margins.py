"""The margin rule: where routing may differ from the oracle's, and by how little.

Compared teacher-forced: at the first token that differs, the first layer that does must be a near tie, every slot
holding an expert whose score is next to the one that the oracle put there. Then the oracle is given the captured row,
and the comparison goes on with the tokens that follow. Dims: R rows, M MoE layers, K experts per token."""

import dataclasses

import numpy as np

NEAR_TIE = 1e-4  # float32; RELIABILITY section 2
MOST_EXCEPTIONS = 1e-3  # of all (token, layer)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first (token, layer) of a token that was routed otherwise than the oracle does, and how far from a tie it
    was."""

    token: int
    layer: int
    margin: float


def differences(oracle, tokens, ids):
    """Compare rows ids [R, M, K] of the first R tokens. Returns the differences, and the last judgement: that of the R
    tokens and, if it exists, of the next, with every differing row forced."""
    tokens = np.asarray(tokens)[: len(ids) + 1]
    flips, num_forced = [], 0
    while True:
        judged = oracle.run(tokens, ids[:num_forced])
        wrong = np.argwhere((judged.ids[num_forced : len(ids)] != ids[num_forced:]).any(-1))
        if len(wrong) == 0:
            return flips, judged
        token, column = num_forced + int(wrong[0, 0]), int(wrong[0, 1])
        scores = judged.scores[token, column]
        margin = np.abs(scores[judged.ids[token, column]] - scores[ids[token, column]]).max()
        flips.append(Difference(token, oracle.moe_layers[column], float(margin)))
        num_forced = token + 1


def assert_margin_rule(oracle, sequences, *, bar=MOST_EXCEPTIONS, near_tie=NEAR_TIE):
    """Judge (tokens, ids) pairs; prints every exception, and fails on one that is no near tie or on too many."""
    compared, listed = 0, []
    for name, (tokens, ids) in enumerate(sequences):
        listed += [(name, difference) for difference in differences(oracle, tokens, ids)[0]]
        compared += ids.shape[0] * ids.shape[1]
    for name, difference in listed:
        print(f"sequence {name}: {difference}")
    print(f"{len(listed)} of {compared} (token, layer) are exceptions")
    assert compared > 0
    assert all(difference.margin < near_tie for _, difference in listed), listed
    assert len(listed) <= bar * compared, f"{len(listed)} of {compared} (token, layer) differ; at most {bar:.2%} may"
