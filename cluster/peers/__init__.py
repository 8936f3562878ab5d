"""A request's hold on a drafter and a verifier: what they lack of the text is sent, what goes wrong is mended.

The only folder that calls peers. A handle takes its lease and opens its text in the background: a verifier's as soon as
it is made, a drafter's when a tree is wanted for the first time, as what it costs is taken from all texts' rounds:

  lease -> open (the whole text) -> draft or verify (what the peer lacks), round after round -> close

- A peer that lost the text (NotFound) is opened again where it is.
- A drafter that is late, wrong or gone costs the round its speculation and nothing else; a later lease brings it back.
- A verifier that is gone is replaced, and the text opened at the next one: the tokens are the same.
"""
