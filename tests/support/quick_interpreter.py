"""Triton's interpreter in a third of its time."""

from __future__ import annotations


def look_once(monkeypatch):
    """At each call of a function inside a kernel, such as `tl.sum`, the interpreter looks through the whole language
    for functions to replace by its own. Here it does so only where the launch, or an earlier call, has not."""
    import triton.language as tl
    from triton.runtime import interpreter

    parts = {}  # key: a function; the parts of the language that it names

    def call(self, *args, **named):
        if self.fn not in parts:
            names = self.fn.__globals__.values()
            parts[self.fn] = [part for part in (tl, tl.core) if any(part is each for each in names)]
        if any(tl.core.is_builtin(part.load) for part in parts[self.fn]):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
