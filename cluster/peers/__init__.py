"""Handles of a request's drafter and verifier: they lease, open, resend and replace peers as needed.

The only folder that calls peers. A handle takes its lease and opens its text in the background: a verifier's as soon as
it is made, a drafter's when the first tree is requested, since its prefill delays the rounds of all texts:

  lease -> open (the whole text) -> draft or verify (what the peer lacks), round after round -> close

- At a peer that lost the text (NotFound) it is opened again, under the same lease.
- A late, wrong or lost drafter costs the round its speculation and nothing else; a later round leases another.
- A lost verifier is replaced, and the text opened at the next one: the tokens are the same.
"""
