"""A rollout server that runs a model with `transformers` alone, for machines without an inference engine.

It has a step loop of its own, because neither of the library's ways to generate fits. `generate` takes a batch, keeps
it until its longest sample ends and shows nothing before; nobody can join, leave, or swap weights between two tokens.
`generate_batch` admits between steps, and makes 123 tokens a second where `generate` makes 4,445 (0.8M parameters,
64 x 48 tokens, one CPU thread). What this package adds is small: slots of KV, and a model call over the rows there are.
"""
