"""The verifier: runs a target that verifies the draft trees of many texts in one step."""
