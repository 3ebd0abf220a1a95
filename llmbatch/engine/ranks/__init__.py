"""Splits a model over several processes, which compute each step together.

Must not import `engine.factory`, `engine.gpu`, or what is above the engine. Start with `engine`: the first rank, which
is all that others see. `plan` says which weights are cut, `shares` cuts them, `collectives` sums what the shares give,
`team` holds the processes of the other ranks, and `rank` is what runs in one of them.
"""
